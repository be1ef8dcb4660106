"""The engine ``fsdp``: plain torch on one rank, FSDP2 on several."""
