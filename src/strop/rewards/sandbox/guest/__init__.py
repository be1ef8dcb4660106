"""Code that runs inside a sandbox, where only the standard library is available."""
