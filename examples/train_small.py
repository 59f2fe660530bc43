"""Train a small language model twice from the same start on the same text: with our op and with the reference.

    python examples/train_small.py
    python examples/train_small.py --steps 200 --tokens 4096 --json curves.json

The model is what a user would write: gated delta rule layers over packed documents of random lengths, bf16 under
autocast with float32 weights, AdamW. Every document draws a successor for each token and follows it, with some noise,
so that a model has to recall what came after a token before. The reference is the chunked form in float32, or with
--reference recurrent the token recurrence, differentiated by autograd. Prints both loss curves and how far they are
apart. Exit code 0; 1 when they disagree or a number is not finite; 2 for wrong usage.

On a Hopper GPU the first step compiles kernels, unless `flashqla warmup` has done so. On a CPU sizes are smaller, and
our op is PyTorch too.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu, softplus

from flashqla import chunk_gated_delta_rule, explain
from flashqla.ops.plan import Plan
from flashqla.reference import chunk_gated_delta_rule_reference, recurrent_gated_delta_rule

Rule = Callable[..., tuple[Tensor, Tensor | None]]

VOCABULARY, SUCCESSORS, NOISE = 64, 4, 0.1
WIDTH, HK, HV, HEAD_DIM, TAPS = 256, 2, 4, 128, 4
LEARNING_RATE, RAMP = 2e-3, 20  # steps until the rate is reached
# What the two runs may differ by, relative: losses at most, losses in the mean, and the gradient of any parameter in
# the first step (L2). Rounding sets the runs apart, and training multiplies that. AdamW hides much of what is wrong in
# a gradient: on a CPU, the losses of 40 steps without dg are 1.4e-3 off at most. The first step shows it.
WORST, MEAN, GRADIENT = 0.05, 0.01, 0.05
IGNORED = -100  # the target of a token that ends its document


@dataclass(frozen=True)
class Batch:
    """One row of documents, end to end: tokens, targets and positions in the document [1, T], offsets [N + 1]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    offsets: Tensor
    offsets_cpu: Tensor


def documents(draw: random.Random, tokens: int, longest: int) -> list[list[int]]:
    """Texts of 1 to `longest` tokens, `tokens` in all."""
    texts: list[list[int]] = []
    while tokens:
        length = min(draw.randint(1, longest), tokens)
        tokens -= length
        successor: dict[int, int] = {}
        text = [draw.randrange(VOCABULARY)]
        while len(text) < length:
            token = text[-1]
            usual = successor.setdefault(token, (token + draw.randint(1, SUCCESSORS)) % VOCABULARY)
            text.append(draw.randrange(VOCABULARY) if draw.random() < NOISE else usual)
        texts.append(text)
    return texts


def batches(steps: int, tokens: int, longest: int, seed: int, device: str) -> list[Batch]:
    draw = random.Random(seed)
    made = []
    for _ in range(steps):
        texts = documents(draw, tokens, longest)
        offsets = torch.tensor([0, *map(len, texts)]).cumsum(0).int()
        rows = [
            [token for text in texts for token in text],
            [target for text in texts for target in [*text[1:], IGNORED]],
            [position for text in texts for position in range(len(text))],
        ]
        inputs, targets, positions = torch.tensor(rows, device=device)[:, None]
        made.append(Batch(inputs, targets, positions, offsets.to(device), offsets))
    return made


class Convolution(nn.Module):
    """Every channel over the last few tokens of its document."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(TAPS)[0].repeat(channels, 1) + 0.1 * torch.randn(channels, TAPS))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        taps = [torch.where(positions[..., None] >= n, x.roll(n, 1), 0) * self.weight[:, n] for n in range(TAPS)]
        return silu(torch.stack(taps).sum(0)).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """x [1, T, WIDTH] -> the same. `rule` is called as chunk_gated_delta_rule is."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.sizes = [HK * HEAD_DIM, HK * HEAD_DIM, HV * HEAD_DIM]
        self.qkv = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.convolution = Convolution(sum(self.sizes))
        self.gates = nn.Linear(WIDTH, 2 * HV, bias=False)
        self.z = nn.Linear(WIDTH, HV * HEAD_DIM, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(1, 16).log())
        step = torch.empty(HV).uniform_(-7, -2.3).exp()  # from 0.001 to 0.1
        self.dt_bias = nn.Parameter(step.expm1().log())  # whose softplus is `step`
        self.norm = nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(HV * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        heads = [
            t.unflatten(-1, (-1, HEAD_DIM))
            for t in self.convolution(self.qkv(x), batch.positions).split(self.sizes, -1)
        ]
        b, a = self.gates(x).chunk(2, -1)
        g = -self.A_log.exp() * softplus(a.float() + self.dt_bias)
        o, _ = self.rule(
            *heads,
            g,
            b.sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=batch.offsets,
            cu_seqlens_cpu=batch.offsets_cpu,
        )
        y: Tensor = self.out(self.norm(o.float()).flatten(2) * silu(self.z(x)))
        return y


class Layer(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.mixer = GatedDeltaNet(rule)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.mixer(self.norms[0](x), batch)
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class Model(nn.Module):
    def __init__(self, layers: int, rule: Rule) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(rule) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """The loss: mean cross entropy of the next token, in nats."""
        x = self.embedding(batch.tokens)
        for layer in self.layers:
            x = layer(x, batch)
        return cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED
        )


def in_float32(
    rule: Rule, q: Tensor, *tensors: Tensor, cu_seqlens_cpu: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """A reference, called as our op is: it computes in float32, which autocast would undo."""
    with torch.autocast(q.device.type, enabled=False):
        o, final_state = rule(q, *tensors, **options, dtype=torch.float32)
    return o.to(q.dtype), final_state


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms by step, gradients of the first step by parameter, and seconds of the later steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    seconds: float

    def finite(self) -> bool:
        return all(map(math.isfinite, [*self.losses, *self.norms]))


def train(rule: Rule, text: list[Batch], layers: int, seed: int, device: str) -> Run:
    torch.manual_seed(seed)
    model = Model(layers, rule).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / RAMP))
    seen: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    begin = 0.0
    for batch in text:
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        if not seen:
            gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
            loss.item()  # waits for the GPU: what comes before may compile, and is not timed
            begin = time.perf_counter()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen.append(torch.stack([loss.detach(), norm]))  # not read before the end, which would wait each time
    losses, norms = torch.stack(seen).T.tolist()
    return Run(losses, norms, gradients, time.perf_counter() - begin)


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative L2 difference."""
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps; 200 on a GPU, 40 on a CPU")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a step; 4096 on a GPU, 256 on a CPU")
    parser.add_argument("--layers", type=int, metavar="N", default=2)
    parser.add_argument("--reference", choices=["chunked", "recurrent"], default="chunked")
    parser.add_argument("--seed", type=int, metavar="N", default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write both curves and the verdict")
    given = parser.parse_args()
    small = given.device == "cpu"
    steps = given.steps or (40 if small else 200)
    tokens = given.tokens or (256 if small else 4096)
    if min(steps, tokens, given.layers) < 1:
        parser.error("--steps, --tokens and --layers are at least 1")

    plans: list[Plan] = []

    def ours(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        if not plans:
            plans.append(explain(*tensors, **options))
            print(f"ours: {plans[0].implementation}, {plans[0].why}")
        return chunk_gated_delta_rule(*tensors, **options)

    references: dict[str, Rule] = {
        "chunked": chunk_gated_delta_rule_reference,
        "recurrent": recurrent_gated_delta_rule,
    }
    text = batches(steps, tokens, tokens // 4 + 1, given.seed, given.device)
    found = train(ours, text, given.layers, given.seed, given.device)
    reference = partial(in_float32, references[given.reference])
    expected = train(reference, text, given.layers, given.seed, given.device)

    differences = [abs(x - y) / abs(y) for x, y in zip(found.losses, expected.losses, strict=True)]
    worst, mean = max(differences), sum(differences) / steps
    gradients = {name: apart(dx, expected.gradients[name]) for name, dx in found.gradients.items()}
    parameter = max(gradients, key=gradients.__getitem__)
    finite = found.finite() and expected.finite()
    agree = finite and worst <= WORST and mean <= MEAN and gradients[parameter] <= GRADIENT

    print(f"{'step':>6}{'ours':>10}{'reference':>11}{'difference':>12}")
    for step in sorted({*range(0, steps, max(1, steps // 20)), steps - 1}):
        print(f"{step + 1:>6}{found.losses[step]:>10.4f}{expected.losses[step]:>11.4f}{differences[step]:>12.1e}")
    print(f"losses are {worst:.1e} apart at most (allowed {WORST}), and {mean:.1e} in the mean (allowed {MEAN})")
    print(f"first gradients are {gradients[parameter]:.1e} apart at most (allowed {GRADIENT}), of {parameter}")
    print("losses and gradients are finite" if finite else "NaN or inf in losses or gradients")
    print(f"{steps - 1} steps after the first: {found.seconds:.1f} s, reference {expected.seconds:.1f} s")
    print("the two runs agree" if agree else "the two runs DISAGREE")
    if given.json:
        kept = {
            "device": given.device,
            "layers": given.layers,
            "tokens": tokens,
            "seed": given.seed,
            "implementation": plans[0].implementation,
            "why": plans[0].why,
            "reference": given.reference,
            "losses": {"ours": found.losses, "reference": expected.losses},
            "gradient_norms": {"ours": found.norms, "reference": expected.norms},
            "seconds": {"ours": found.seconds, "reference": expected.seconds},
            "largest_loss_difference": worst,
            "mean_loss_difference": mean,
            "first_gradient_differences": gradients,
            "finite": finite,
            "agree": agree,
        }
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
