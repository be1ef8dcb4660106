"""What runs inside a sandbox: the standard library only, as nothing else is there."""
