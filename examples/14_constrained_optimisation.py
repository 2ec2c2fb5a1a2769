"""A constrained problem whose data stay where they are: consensus ADMM over `Group.all_reduce`.

    python examples/14_constrained_optimisation.py                one process
    shoal run -n 2 examples/14_constrained_optimisation.py        two workers, the same solution

Find the portfolio x (no short sales: x >= 0; all money spent: sum x = 1) that follows an index best: least squares
over days, and each worker has days of its own that nobody else sees. Every worker solves a regularised problem of its
own, the mean over workers is projected onto the constraints, and prices make the workers agree. What travels is one
vector a round, not the data. In the end the conditions of Karush, Kuhn and Tucker are checked for the whole problem.
"""

import torch

import shoal

NUM_ASSETS, NUM_DAYS, PENALTY = 40, 2_000, 60.0


def my_days(rank, size):
    """The returns of all assets on this worker's days, and those of the index, which holds every fifth asset."""
    random = torch.Generator().manual_seed(0)
    returns = torch.randn(NUM_DAYS, NUM_ASSETS, generator=random, dtype=torch.float64)
    weights = torch.zeros(NUM_ASSETS, dtype=torch.float64)
    weights[::5] = 1 / len(weights[::5])
    index = returns @ weights + 0.1 * torch.randn(NUM_DAYS, generator=random, dtype=torch.float64)
    return returns[rank::size], index[rank::size]


def project(vector):
    """The nearest point with x >= 0 and sum x = 1."""
    falling = vector.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(vector) + 1)
    return (vector - excess[(falling > excess).sum() - 1]).clamp(min=0)


def solve(group, returns, index, tolerance=1e-9, max_rounds=2_000):
    """Minimise the sum over workers of |R x - i|^2 / 2 on the simplex; returns x and the number of rounds."""
    # Factorised once: every round is then one triangular solve.
    gram = returns.T @ returns + PENALTY * torch.eye(NUM_ASSETS, dtype=torch.float64)
    factor, target = torch.linalg.cholesky(gram), returns.T @ index
    agreed = torch.full((NUM_ASSETS,), 1 / NUM_ASSETS, dtype=torch.float64)
    price = torch.zeros_like(agreed)
    for number in range(1, max_rounds + 1):
        own = torch.cholesky_solve((target + PENALTY * (agreed - price))[:, None], factor)[:, 0]
        mean = own + price
        group.all_reduce(mean).wait()
        before, agreed = agreed, project(mean / group.size)
        price += own - agreed
        # How far workers are from each other, and how far this round moved: all see the same two numbers.
        apart = torch.stack([(own - agreed).square().sum(), (agreed - before).square().sum()])
        group.all_reduce(apart).wait()
        if apart.sum().sqrt() < tolerance:
            return agreed, number
    raise RuntimeError(f"no agreement after {max_rounds} rounds")


def kkt_residual(group, returns, index, x):
    """How far x is from satisfying the conditions: |x - project(x - gradient)|, zero at the solution only.

    The gradient is that of the whole problem, divided by its number of days.
    """
    gradient = returns.T @ (returns @ x - index)
    group.all_reduce(gradient).wait()
    return (x - project(x - gradient / NUM_DAYS)).norm().item()


def main():
    group = shoal.group()
    returns, index = my_days(group.rank, group.size)
    x, rounds = solve(group, returns, index)
    residual = kkt_residual(group, returns, index, x)
    if group.rank == 0:
        held = (x > 1e-9).nonzero().flatten().tolist()
        print(
            f"{group.size} worker{'s' * (group.size != 1)}, {rounds} rounds, {len(held)} of {NUM_ASSETS} assets held"
        )
        print(f"KKT residual {residual:.1e}, sum {x.sum().item():.9f}, smallest {x.min().item():.1e}")
        print("x =", " ".join(f"{value:.4f}" for value in x[:6].tolist()), "...")
    assert residual < 1e-7
    group.close()


main()
