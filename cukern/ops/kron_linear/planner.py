"""Plans a layer: which launches its forward and its backward are, and what the forward keeps for the
backward.

A candidate is a kernel for a part of a layer, a run of neighbouring factors. It yields the launches that fit,
with predicted times. The fastest cut of the layer into runs is chosen.
"""

from collections.abc import Callable, Iterator, Sequence

from cukern.ops.kron_linear import chain_wgmma, cublas, tile, tile_backward, wgmma
from cukern.ops.kron_linear.plan import MOST, Launch, Problem, Sizes, Step, least_us, planned_rows, steps
from cukern.runtime.device import cached, eligible

Run = Sequence[Step]
Plan = tuple[Launch, ...]
Candidate = Callable[[Run, int, Problem], Iterator[Launch]]

BETWEEN = 128 << 20  # bytes, at most, of an array between two launches; more rows are split
# Two launches take longer than the sum of their times: by this part of the sum, and at most 8 us.
BETWEEN_US = 8.0
BETWEEN_PART = 0.32

FORWARD: tuple[Candidate, ...] = (
    tile.forward,
    chain_wgmma.forward,
    wgmma.forward,
    cublas.small_right,
    cublas.forward,
)
BACKWARD: tuple[Candidate, ...] = (tile_backward.backward, wgmma.backward, wgmma.few_rows)


@cached(512)
def forward(sizes: Sizes, rows: int, target: Problem, count: int | None = None) -> Plan:
    """The launches of a layer on `rows` rows, or of its first `count` steps."""
    order = steps(sizes)[:count]

    def launch(first: int, end: int) -> Launch | None:
        return fastest(order[first:end], rows, target if first == 0 else target._replace(aligned=16))

    options = [_best_cut(order, launch, lambda _, us, rest: us + (gap_us(us) if rest else 0.0))]
    if count is None:  # chain_wgmma multiplies by the left factor first, whichever the steps have first
        right_first = steps(sizes, tuple(range(len(sizes)))[::-1])
        options += [(g.us, (g,)) for g in chain_wgmma.forward(right_first, rows, target)]
    us, plan = _best(options)
    if count is None and cublas.takes_forward(order, target) and [g.kernel for g in plan] == ["cublas"] * 2:
        return (Launch("cublas", order, us),)
    return plan


def _best(options: Sequence[tuple[float, Plan]]) -> tuple[float, Plan]:
    """The fastest of the eligible plans. The first one is for any factors."""
    return min(eligible(options, lambda o: o[1][0].kernel) or options[:1], key=lambda o: o[0])


def _best_cut(
    order: Run, launch: Callable[[int, int], Launch | None], total: Callable[[int, float, Plan], float]
) -> tuple[float, Plan]:
    """The time of the fastest launches for all steps, and these. launch(first, end) is the launch of some
    steps; total(first, us, rest) the time from step `first` on, if it and the `rest` after it take `us`."""
    best: list[tuple[float, Plan]] = [(0.0, ())]  # for the last n steps
    for first in reversed(range(len(order))):
        options = []
        for end in range(first + 1, end_of_run(order, first) + 1):
            us, rest = best[len(order) - end]
            if made := launch(first, end):
                options.append((total(first, us + made.us, rest), (made, *rest)))
        best.append(min(options, key=lambda o: o[0]))
    return best[-1]


def gap_us(us: float) -> float:
    """Extra time of two consecutive launches over the sum of their times, `us`."""
    return min(BETWEEN_US, BETWEEN_PART * us)


def rows_at_once(plan: Plan, rows: int, itemsize: int) -> int:
    """The number of rows that pass through all launches before the next rows begin: arrays between launches
    have at most BETWEEN bytes."""
    last = [s for launch in plan for s in (launch.steps[-1:] if launch.threads else launch.steps)][:-1]
    widest = max((s.left * s.q * s.right for s in last), default=0) * itemsize
    return rows if rows * widest <= BETWEEN else max(1, BETWEEN // widest)


def end_of_run(order: Run, first: int) -> int:
    """The end of the at most MOST steps from `first` on that are neighbouring factors, from right to left."""
    end = first + 1
    while end < min(len(order), first + MOST) and order[end].factor == order[end - 1].factor - 1:
        end += 1
    return end


@cached(4096)
def fastest(run: Run, rows: int, target: Problem) -> Launch | None:
    """The fastest launch of a run of steps, if there is one. For a single step there is always cuBLAS."""
    found = [g for candidate in FORWARD for g in candidate(run, rows, target)]
    best = _fastest(found, least_us(run, rows, target))
    return cublas.launch(run, rows, target) if best is None and len(run) == 1 else best


def _fastest(found: list[Launch], least: float, more: Sequence[Launch] = ()) -> Launch | None:
    """The fastest of the eligible launches and `more`; none takes less than `least`."""
    possible = [
        g if g.us >= least else g._replace(us=least) for g in (*eligible(found, lambda g: g.kernel), *more)
    ]
    return min(possible, key=lambda g: (g.us * g.handicap, g.products), default=None)


@cached(512)
def backward(sizes: Sizes, rows: int, target: Problem) -> Plan:
    """The launches of a layer's backward, those of the first steps first. The inputs of all but the first are
    computed again from x."""
    order = steps(sizes)

    def launch(first: int, end: int) -> Launch | None:
        run = order[first:end]
        separate = [_separate(run[0], rows * run[0].left, target)] if len(run) == 1 else []
        found = [b for candidate in BACKWARD for b in candidate(run, rows, target)]
        return _fastest(found, 1.5 * least_us(run, rows, target), separate)

    def total(first: int, us: float, rest: Plan) -> float:
        return us + (sum(g.us for g in forward(sizes, rows, target, first)) if first else 0.0)

    options = [_best_cut(order, launch, total)]
    if cublas.takes_layer(order, target):  # its forward may take longer than the other one
        more = cublas.us_of_layer(order, rows, target) - sum(g.us for g in forward(sizes, rows, target))
        options.append((more, (Launch("cublas", order, more),)))
    plan = _best(options)[1]
    return tuple(g._replace(plan=(g.template(),)) for g in plan)  # calls do not make the text again


def _separate(s: Step, A: int, target: Problem) -> Launch:
    """One step, by a launch for the gradient of its input and one for that of its factor."""
    back = fastest((Step(0, 1, s.q, s.p, s.right),), A, target)
    assert back
    return Launch("separate", (s,), back.us + tile_backward.gradient_of(A, s.p, s.q, s.right, target).us)


def keeping(sizes: Sizes, rows: int, target: Problem) -> Plan:
    """The forward in two launches, if the backward has two. It keeps the array between them for the backward.
    Empty if that is slower, or takes more memory than x and y because the backward cannot write dx over its
    inputs. One launch: cublas.layer_forward."""
    planned = planned_rows(rows)
    plan = backward(sizes, planned, target)
    if plan[0].kernel == "cublas" and len(sizes) == 2:
        return plan
    if len(plan) != 2 or rows_at_once(plan, rows, target.itemsize) < rows:
        return ()
    first, second = plan
    parts = fastest(first.steps, planned, target), fastest(second.steps, planned, target._replace(aligned=16))
    launches = tuple(part for part in parts if part)
    if len(launches) < 2 or not (second.threads or first.in_place):
        return ()
    whole = forward(sizes, planned, target)
    anew = forward(sizes, planned, target, len(first.steps))
    two = sum(part.us for part in launches)
    two += gap_us(two) if len(whole) == 1 else 0.0
    return launches if two <= sum(g.us for g in (*whole, *anew)) else ()
