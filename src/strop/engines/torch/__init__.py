"""The plain torch back-end."""
