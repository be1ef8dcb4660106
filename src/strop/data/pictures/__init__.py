"""Pictures of rows: from what users have (paths, bytes, data URLs, ...) to digests and token ids."""
