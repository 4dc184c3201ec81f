"""Train a policy that imitates a robot: from two images and states, the next eight actions.

The packed dataset has one sample per step, with ``rgb``, ``state`` and ``action``, and ids that end with the
number of the step. `train` is the training program; it stops after some batches and resumes on any number of ranks
that divides the batch, with the same losses and weights, bit for bit::

    torchrun --nproc-per-node 1 examples/robot_windows.py DATA CHECKPOINT BATCHES
    torchrun --nproc-per-node 2 examples/robot_windows.py DATA CHECKPOINT BATCHES
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import mm_assets
from mm_assets import MultimodalCollator, MultimodalLoader

try:
    import torch
except ImportError as error:
    raise SystemExit("this example needs torch: pip install 'mm-assets[torch]'") from error
from torch import distributed, nn

AT = {"rgb": [-1, 0], "state": [-1, 0], "action": range(8)}  # steps from the current one
SIDE = 32  # pixels of the square that an image is decoded to
BATCH_SIZE = 8  # of all ranks together


class Policy(nn.Module):
    """A small network; `item` is one item of the data, for the sizes."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        num_inputs, num_outputs = item["rgb"].size + item["state"].size, item["action"].size
        self.layers = nn.Sequential(nn.Linear(num_inputs, 256), nn.GELU(), nn.Linear(256, num_outputs))

    def loss(self, row: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the squared error of the actions that the episode has."""
        inputs = torch.cat([row["rgb"].flatten() / 255, row["state"].flatten()]).float()
        errors = self.layers(inputs).view_as(row["action"]) - row["action"]
        return errors[~row["action_is_pad"]].square().mean()


def set_gradients(policy: Policy, batch: Mapping[str, torch.Tensor]) -> None:
    """Set the gradients to the mean over the rows of all ranks.

    Rows are summed in the order of the ranks, one by one: so the sum is the same, bit for bit, on any number of ranks.
    A run that needs this only on the same number of ranks wraps the policy in `DistributedDataParallel`.
    """
    names = (*AT, "action_is_pad")
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
    gradients = [torch.autograd.grad(policy.loss(row), list(policy.parameters())) for row in rows]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, gradients)
    for parameter, *parts in zip(policy.parameters(), *chain.from_iterable(gathered), strict=True):
        parameter.grad = sum(parts) / BATCH_SIZE


def train(path: str, checkpoint: Path, num_batches: int) -> None:
    """Train for some batches, from the checkpoint on if there is one, and write the checkpoint."""
    data = mm_assets.open(path).with_settings({"rgb": {"decode_size": [SIDE, SIDE], "channels": 3}})
    windows = data.select(data.presence("action")).windows(AT, group="sample_id", order="sample_id")
    collator = MultimodalCollator({name: {"stack": True} for name in (*AT, "action_is_pad")}, "pt")
    loader = MultimodalLoader(windows, None, BATCH_SIZE // distributed.get_world_size(), collator=collator, last="drop")
    policy = Policy(windows[0])
    optimizer = torch.optim.AdamW(policy.parameters())
    run: dict[str, Any] = {"loader": loader, "policy": policy, "optimizer": optimizer}
    if checkpoint.exists():
        for name, state in torch.load(checkpoint).items():
            run[name].load_state_dict(state)
    for batch in islice(chain.from_iterable(repeat(loader)), num_batches):  # one epoch after the other
        set_gradients(policy, batch)
        optimizer.step()
    if distributed.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in run.items()}, checkpoint)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the order of sums is the same on every machine
    distributed.init_process_group("gloo")
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    distributed.destroy_process_group()
