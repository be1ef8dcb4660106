"""Shared test data: random samples with uneven lengths, and a parquet file of prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.protocol import DataProto


def random_samples(
    n_rows: int, *, prompt_width: int = 6, response_width: int = 5, vocabulary: int = 19, seed: int = 0
) -> DataProto:
    """Return left-padded prompts and right-padded responses of uneven lengths, as a rollout does."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(1, prompt_width + 1, (n_rows,), generator=generator)
    response_lengths = torch.randint(1, response_width + 1, (n_rows,), generator=generator)
    prompt_mask = torch.arange(prompt_width) >= (prompt_width - prompt_lengths)[:, None]
    response_mask = torch.arange(response_width) < response_lengths[:, None]
    ids = torch.randint(4, vocabulary, (n_rows, prompt_width + response_width), generator=generator)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    ids = ids * attention_mask
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "response_mask": response_mask.float(),
            "truncated": response_lengths == response_width,
        }
    )


def write_prompts(path: Path, n_rows: int, *, data_source: str = "strop/arithmetic") -> Path:
    """Write a parquet file of one-digit additions; return ``path``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": f"{i % 10}+{i // 10 % 10}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10 + i // 10 % 10)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(n_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def one_row(**columns: torch.Tensor) -> DataProto:
    """Return a row of two prompt and two response tokens, with further ``columns``."""
    row = {
        "input_ids": torch.tensor([[5, 6, 7, 8]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
        "position_ids": torch.arange(4)[None],
        "responses": torch.tensor([[7, 8]]),
        "response_mask": torch.ones(1, 2),
    }
    return DataProto(row | columns)
