"""Write trl_distillation.json: divergences by TRL's ``generalized_jsd_loss``, of distributions by seed.

Takes the function from the source of TRL 1.16.0, whose wheel is unpacked into a folder, the argument:
its module imports packages that the function does not need.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import torch
from torch.nn import functional

BATCHES, N, V = 100, 5, 37


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits [N, V] of teacher and student."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = 3 * torch.randn(2, N, V, generator=generator)
    return teacher, student


def settings(seed: int) -> tuple[float, float]:
    """Return TRL's beta and the temperature: of five batches one forward and one reverse KL."""
    return (0.0, 1.0, 0.1, 0.5, 0.9)[seed % 5], (1.0, 0.7)[seed % 2]


def main(wheel: Path) -> None:
    """Write the file beside this one."""
    tree = ast.parse((wheel / "trl/experimental/gkd/gkd_trainer.py").read_text())
    (function,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "generalized_jsd_loss"
    ]
    function.decorator_list = []
    names = {"torch": torch, "F": functional}
    exec(compile(ast.Module([function], []), "gkd_trainer.py", "exec"), names)
    found = []
    for seed in range(BATCHES):
        teacher, student = logits(seed)
        beta, temperature = settings(seed)
        student.requires_grad_()
        options = {"beta": beta, "temperature": temperature, "reduction": "sum"}
        loss = names["generalized_jsd_loss"](student[None], teacher[None], **options)
        (gradient,) = torch.autograd.grad(loss, student)
        found.append([float(loss.detach()), *gradient[0, :2].tolist()])
    Path(__file__).with_suffix(".json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
