"""The table and the timeline of simulated systems."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rollpacker.report.table import MAX_WIDTH
from rollpacker.sim.result import StepResult, SystemResult
from rollpacker.sim.table import explain, explain_what_if, render
from rollpacker.sim.timeline import FORMATS, choose_steps, draw


def step(kind: str = "plain", total_s: float = 100.0, **changes: float) -> StepResult:
    """60 % rollout, 10 % reward, 20 % training, 10 % sync."""
    values = {
        "rollout_s": 0.6 * total_s,
        "reward_s": 0.1 * total_s,
        "train_s": 0.2 * total_s,
        "sync_s": 0.1 * total_s,
        "total_s": total_s,
        "tensor_parallel": 1,
        "preemptions": 0,
        "max_response_tokens": 4096,
        "tokens_generated": 1500,
        "tokens_trained": 1000,
        "num_trained": 10,
        "num_streamed": 0,
    }
    return StepResult(kind=kind, **(values | changes))


def system(*steps: StepResult, **changes: object) -> SystemResult:
    result = SystemResult(
        steps=steps,
        tokens_generated=sum(s.tokens_generated for s in steps),
        tokens_trained=sum(s.tokens_trained for s in steps),
        trained_length_mean=100.0,
        policy_length_mean=100.0,
        policy_length_p95=400.0,
        tail_trained_share=0.05,
        bubble={"tail": 160.0, "reward_wait": 80.0, "migration": 0.0, "sync": 80.0},
        device_seconds=8 * sum(s.total_s for s in steps),
        num_releases=0,
    )
    return replace(result, **changes)


SHORT, LONG = step("short", 40.0, tensor_parallel=2, preemptions=3), step("long", 140.0)
RACING = system(
    *[SHORT] * 4,
    LONG,
    trained_length_mean=63.0,
    tail_trained_share=0.013,
    num_releases=1,
)
"""60 s a step on average."""
RESULTS = {"verl": system(*[step()] * 5), "rollpacker": RACING, "oracle": system(*[step()] * 5)}


def row(text: str, title: str, name: str) -> dict[str, str]:
    """The cells of a system in the table of that title, by column."""
    lines = text.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith(title))
    line = next(line for line in lines[head + 2 :] if line.startswith(f"{name} "))
    columns = [word.strip() for word in lines[head].split("   ") if word.strip()]
    cells = [word.strip() for word in line.split("   ") if word.strip()]
    assert len(columns) == len(cells), (columns, cells)
    return dict(zip(columns, cells, strict=True))


def test_seconds_and_speed_of_each_system():
    text = render(RESULTS)
    cells = row(text, "seconds of a step", "rollpacker")
    assert (cells["step"], cells["speed"]) == ("60.0", "1.67x")
    stages = [cells[name] for name in ("rollout", "reward", "training", "weight sync")]
    assert stages == ["36.0", "6.0", "12.0", "6.0"]
    assert row(text, "seconds of a step", "verl")["speed"] == "1.00x"


def test_kinds_of_rounds_are_apart():
    text = render(RESULTS)
    cells = row(text, "rounds", "rollpacker")
    assert cells["short"] == "40.0 x 4" and cells["long"] == "140.0 x 1" and cells["plain"] == "-"
    assert (cells["TP"], cells["preemptions"], cells["releases"]) == ("1, 2", "12", "1")
    assert "cascade" not in text
    cascade = system(SHORT, step("cascade", 60.0), LONG)
    assert row(render({"one": cascade}), "rounds", "one")["cascade"] == "60.0 x 1"


def test_lengths_and_idle_time():
    text = render(RESULTS)
    cells = row(text, "tokens of a response", "rollpacker")
    assert (cells["trained"], cells["own"], cells["shift"]) == ("63", "100", "-37%")
    assert (cells["beyond P95"], cells["generated/trained"]) == ("1.3%", "1.50")
    cells = row(text, "idle", "rollpacker")  # of 2400 device seconds
    shares = [cells[cause] for cause in ("tail", "reward wait", "migration", "sync", "sum")]
    assert shares == ["6.7%", "3.3%", "0.0%", "3.3%", "13.3%"]
    assert "idle" not in render(RESULTS, idle=False)


def test_another_reference_has_speed_one():
    text = render(RESULTS, reference="rollpacker")
    assert row(text, "seconds of a step", "rollpacker")["speed"] == "1.00x"
    assert row(text, "seconds of a step", "verl")["speed"] == "0.60x"


def test_the_table_fits_and_is_plain():
    large = step("flush", 1e6, preemptions=10**7)
    kinds = [step(kind, 12345.6) for kind in ("plain", "short", "cascade", "long")]
    text = render({"rollpacker": system(*kinds, large, num_releases=10**6), **RESULTS})
    assert max(map(len, text.splitlines())) <= MAX_WIDTH
    assert text.isascii() and "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_short_steps_have_more_decimals():
    cells = row(render({"run": system(step(total_s=0.5))}), "seconds of a step", "run")
    assert (cells["step"], cells["rollout"]) == ("0.500", "0.300")


def test_what_is_not_known_is_a_dash():
    unknown = system(
        step(),
        policy_length_mean=math.nan,
        tail_trained_share=math.nan,
        bubble={},
        device_seconds=0,
    )
    text = render({"run": unknown})
    assert row(text, "tokens of a response", "run")["shift"] == "-"
    assert row(text, "idle", "run")["sum"] == "-"
    assert "nan" not in text + explain({"run": unknown})


def test_it_says_where_the_step_goes_and_what_is_trained_on():
    text = explain(RESULTS)
    assert "The largest part of rollpacker's step is rollout: 36.0 of 60.0 s (60%)." in text
    assert "The step is 40% shorter than verl's and 40% shorter than oracle's." in text
    assert "rollpacker trains on responses 37% shorter than the policy's own" in text
    assert "1.3% of them are longer than the policy's P95 (5% without selection)" in text


def test_the_oracle_is_only_compared_with():
    quick = system(*[step(total_s=10.0)] * 5)
    text = explain({"rollpacker": RACING, "oracle": quick})
    assert "rollpacker's step is rollout" in text and "6.0x as long as oracle's" in text
    assert "oracle's step is rollout" in explain({"oracle": quick})


def test_lengths_like_the_policys_own_are_called_so():
    text = explain({"verl": system(step(), trained_length_mean=99.0)})
    assert "as long as the policy's own" in text and "shorter" not in text


def test_a_what_if_says_how_good_the_fit_is():
    measured, same, changed = (system(step(total_s=s)) for s in (100.0, 90.0, 45.0))
    text = explain_what_if({"measured": measured, "simulated": same, "what-if": changed})
    assert "would take 45.0 s instead of 90.0 s, which is 50% shorter than before" in text
    assert "the run's step is 10% shorter than measured (100.0 s)" in text


def test_a_run_without_changes_is_simulated_once():
    measured, same = (system(step(total_s=s)) for s in (100.0, 90.0))
    text = explain_what_if({"measured": measured, "simulated": same})
    assert text.startswith("Simulated as it was, the run's step is 10% shorter than measured")
    assert "With the changes" not in text


def test_what_follows_the_optimizer_step_of_a_run_is_more_than_the_sync():
    text = render({"measured": system(step())}, last_stage="sync, commit")
    assert "sync, commit" in text and "weight sync" not in text


def test_a_shift_of_few_steps_is_no_selection():
    early = [step("short", 60.0)] * 4
    late = [step("short", 80.0)] * 4
    result = system(*early, *late, trained_length_mean=85.0, own_length_mean=85.0)
    text = explain({"rollpacker": result})
    assert "the shift of -15% is against all prompts" in text
    assert "the later half take 80.0 s each, not 70.0 s" in text
    kept = system(*early, *late, own_length_mean=100.0)
    assert "against all prompts" not in explain({"rollpacker": kept})


def test_a_speed_that_the_first_steps_flatter_is_marked():
    steps = [*[step("short", 40.0)] * 4, *[step("short", 60.0)] * 4]
    pooled = system(*steps, trained_length_mean=85.0, own_length_mean=85.0)
    results = {"verl": system(*[step()] * 8), "rollpacker": pooled}
    assert row(render(results), "seconds of a step", "rollpacker")["speed"] == "~2.00x"
    assert row(render(results), "seconds of a step", "verl")["speed"] == "1.00x"
    assert "~ marks a speed" in explain(results)
    turned = render(results, reference="rollpacker")
    assert row(turned, "seconds of a step", "rollpacker")["speed"] == "1.00x"
    assert row(turned, "seconds of a step", "verl")["speed"] == "~0.50x"
    kept = {**results, "rollpacker": system(*steps, own_length_mean=100.0)}
    assert "~" not in render(kept) + explain(kept)
    # The later half is not slower here, which is not claimed either.
    faster = system(*reversed(steps), trained_length_mean=85.0, own_length_mean=85.0)
    assert "the later half" not in explain({"rollpacker": faster})


# -- the picture -------------------------------------------------------------------


def cycle(num_short: int, times: int) -> SystemResult:
    return system(*([*[SHORT] * num_short, LONG] * times))


def kinds(result: SystemResult, shown: range) -> list[str]:
    return [result.steps[place].kind for place in shown]


@pytest.mark.parametrize("num_short", [2, 4, 8])
def test_the_steps_shown_have_the_mix_of_the_run(num_short):
    racing = cycle(num_short, 6)
    shown = choose_steps({"verl": system(*[step()] * len(racing.steps)), "rollpacker": racing})
    found = kinds(racing, shown)
    assert found[-1] == "long" and 5 <= len(found) <= 12
    assert found.count("short") == num_short * found.count("long")


def test_without_long_rounds_the_first_steps_are_shown():
    assert choose_steps({"verl": system(*[step()] * 40)}) == range(0, 5)
    assert choose_steps({"verl": system(step())}) == range(0, 1)
    assert choose_steps({"verl": system(step(), step()), "other": RACING}) == range(0, 2)


@pytest.mark.parametrize(
    ("results", "ending"),
    list(zip((RESULTS, {"rollpacker": RACING}, {"one": system(step())}), FORMATS, strict=True)),
)
def test_pictures_are_written(results, ending, tmp_path):
    path = tmp_path / f"picture{ending}"
    draw(results, path, title="small")
    begin = path.read_bytes()[:200]
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    assert begin.startswith(magic)
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_says_what_it_shows(tmp_path):
    """Bars as long as the seconds, in the order of the stages, one legend."""
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float, float]] = []
    real = Axes.barh

    def barh(self, y, width, **settings):
        drawn.append((y, settings["left"], width))
        return real(self, y, width, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "barh", barh)
        draw(
            {"verl": system(step()), "other": system(step("plain", 40.0))},
            tmp_path / "a.svg",
            title="t",
        )
    assert drawn[:4] == [(0, 0.0, 60.0), (0, 60.0, 10.0), (0, 70.0, 20.0), (0, 90.0, 10.0)]
    assert drawn[4:8] == [(1, 0.0, 24.0), (1, 24.0, 4.0), (1, 28.0, 8.0), (1, 36.0, 4.0)]
    assert drawn[8:] == drawn[:8]  # the mean of one step is that step


# -- what a shorter step is worth --------------------------------------------------


def test_tokens_per_second_stand_beside_the_step() -> None:
    rows = render(RESULTS).splitlines()
    assert "tokens/s" in rows[0]
    found = {line.split()[0]: line.split()[3] for line in rows[2:5]}
    assert found == {"verl": "10", "rollpacker": "17", "oracle": "10"}


def test_a_step_that_is_shorter_only_because_it_trains_on_less_says_so() -> None:
    less = system(*[step(total_s=70.0, tokens_trained=630)] * 5)
    more = system(*[step(total_s=50.0, tokens_trained=630)] * 5)
    text = explain({"verl": system(*[step()] * 5), "less": less, "more": more})
    assert "Mind less: its step is shorter only because it trains on 37% fewer tokens" in text
    assert "Mind more: its step is 50% shorter and trains on 37% fewer tokens" in text
    assert "1.26x verl" in text
    assert "fewer tokens" not in explain(RESULTS)
    told = explain_what_if({"measured": system(step()), "simulated": system(step()), "x": less})
    assert "it trains on 37% fewer tokens" in told


def test_a_system_that_beats_the_oracle_says_why() -> None:
    """An oracle slower than the system that it bounds had no word beside it."""
    pool = system(*[step(total_s=60.0)] * 5)
    text = explain({"pool": pool, "race": RACING, "oracle": system(*[step()] * 5)})
    assert "The oracle bounds only what reordering gives to rounds that await every" in text
    assert "pool awaits nobody" in text
    assert "race leaves long responses out" in text
    assert "The oracle bounds" not in explain({"slow": system(step()), "oracle": RACING})
