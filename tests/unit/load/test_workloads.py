"""Workloads have the requested rate and ascend; the same seed gives the same workload."""

import bz2
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.cluster.load.traces import description, trace
from isobatch.cluster.load.workloads import PROCESSES, Mix, arrivals, exit_blocks
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile


@pytest.mark.parametrize("process", PROCESSES)
@settings(max_examples=10, deadline=None)
@given(rate=st.floats(50, 500), seconds=st.floats(100, 300), seed=st.integers(0, 99))
def test_arrivals_ascend_and_keep_their_mean_rate(process: str, rate: float, seconds: float, seed: int) -> None:
    times = arrivals(process, rate, seconds, seed, cv=1.5)
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] <= times[-1] <= seconds
    assert len(times) == pytest.approx(rate * seconds, rel=0.15)
    assert np.array_equal(times, arrivals(process, rate, seconds, seed, cv=1.5))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_vary_by_cv(cv: float) -> None:
    gaps = np.diff(arrivals("gamma", 100, 1000, seed=1, cv=cv))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_counts_per_minute_keep_their_shape_at_any_rate(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("minute,count\n0,10\n1,30\n")
    times = trace(path, rate_per_s=200, seconds=240)  # twice through the trace
    per_minute = np.histogram(times, 4, (0, 240))[0]
    assert per_minute == pytest.approx(np.array([6000, 18000, 6000, 18000]), rel=0.05)


def test_recorded_times_are_stretched_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("TIMESTAMP,Tokens\n2023-11-16 18:00:00.0\n2023-11-16 18:00:01.0\n2023-11-16 18:00:04.0\n")
    times = trace(path, rate_per_s=2, seconds=6)
    gaps = np.diff(times)
    assert len(times) in (11, 12)
    assert sorted(set(np.round(gaps / gaps.min(), 6))) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("rate", "expected"), [(None, 100), (20.0, 200)])
def test_a_trace_that_begins_busily_lasts_as_long_as_the_load(
    tmp_path: Path, rate: float | None, expected: int
) -> None:
    """Ten a second for ten seconds, then one a second."""
    seconds = [*np.arange(100) / 10, *range(10, 60)]
    path = tmp_path / "times.csv"
    path.write_text("TIMESTAMP\n" + "".join(f"2023-11-16 18:00:{each:06.3f}\n" for each in seconds))
    times = trace(path, rate, seconds=10)
    assert len(times) == pytest.approx(expected, abs=3)
    assert times[-1] > 9.5


def test_a_trace_may_keep_its_own_rate(tmp_path: Path) -> None:
    counts, times = tmp_path / "counts.csv", tmp_path / "times.csv"
    counts.write_text("minute,count\n0,600\n1,1800\n")
    times.write_text("TIMESTAMP\n2023-11-16 18:00:00.0\n2023-11-16 18:00:02.0\n")
    assert len(trace(counts, None, seconds=120)) == pytest.approx(2400, rel=0.1)
    cut = trace(counts, None, seconds=90)
    assert (len(cut), (cut < 60).sum()) == (pytest.approx(1500, rel=0.1), pytest.approx(600, rel=0.15))
    assert len(trace(counts, 5.0, seconds=90)) == pytest.approx(450, rel=0.2)
    assert len(trace(times, None, seconds=100)) == pytest.approx(50, abs=1)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "0 600\n1 1800\n", "2 counts, each of 60 s (assumed, as the file does not say it"),
        ("a.csv", "600\n1800\n600\n", "3 counts, each of 1 s (assumed, as the file does not say it"),
        ("a.csv", "minute;count\n0;600\n1;1800\n", "2 counts, each of 60 s; 20.0 arrivals a second"),
        ("a.csv", "second,count\n0,600\n1,1800\n", "2 counts, each of 1 s; 1,200.0 arrivals a second"),
        ("a.tsv", "0\t600\n300\t1800\n600\t600\n", "3 counts, each of 300 s; 3.3 arrivals a second"),
        ("a.csv", "TIMESTAMP\n2023-11-16 18:00:00.0\n2023-11-16 18:00:02.0\n", "2 arrival times in 2 s"),
        ("a.csv", "TIMESTAMP\n\n2023-11-16 18:00:00.0\n2023-11-16 18:00:02.0\n\n", "2 arrival times in 2 s"),
        ("a.csv", "function,minute_1,minute_2\nf,60,0\n\ng,0,60\n\n", "2 counts, each of 60 s; 1.0 arrivals a second"),
        ("a.csv", "function,minute_1,minute_2\nf,60,0\ng,0,60\n", "2 counts, each of 60 s; 1.0 arrivals a second"),
    ],
)
def test_traces_of_other_formats_are_read_and_described(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    assert says in description(tmp_path / name)
    assert len(trace(tmp_path / name, 100, seconds=1200)) > 100


def test_a_published_archive_is_one_line_of_counts_per_second(tmp_path: Path) -> None:
    inside, path = tmp_path / "workload.txt", tmp_path / "trace.tbz2"
    inside.write_text("2 4 0 0 6")
    with tarfile.open(path, "w:bz2") as archive:
        archive.add(inside, inside.name)
    assert "3 counts, each of 1 s" in description(path)  # seconds without any are gaps in the record
    alone = tmp_path / "trace.txt.bz2"
    alone.write_bytes(bz2.compress(b"0 600\n1 1800\n"))
    assert "2 counts, each of 60 s" in description(alone)


def test_the_user_can_give_the_length_of_a_count(tmp_path: Path) -> None:
    path = tmp_path / "counts.txt"
    path.write_text("0 100\n1 300\n")
    assert description(path, each_s=1.0).endswith("2 counts, each of 1 s; 200.0 arrivals a second")
    assert len(trace(path, None, seconds=60, each_s=1.0)) == pytest.approx(12_000, rel=0.1)
    with pytest.raises(UserError, match="--trace-each-s 0 must be above 0"):
        description(path, each_s=0)
    path.write_text("TIMESTAMP\n2023-11-16 18:00:00.0\n2023-11-16 18:00:02.0\n")
    with pytest.raises(UserError, match=r"--trace-each-s 2 is for counts, and .*counts\.txt has times: leave it out"):
        description(path, each_s=2.0)


@pytest.mark.parametrize("zone", ["Z", "+02:00", "-05:00"])
def test_times_of_a_trace_may_name_their_zone(tmp_path: Path, zone: str, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "times.csv"
    path.write_text(f"TIMESTAMP\n2023-11-16T18:00:00{zone}\n2023-11-16T18:00:02{zone}\n")
    assert description(path).endswith("2 arrival times in 2 s")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", b"a,b,c\n1,2,3\n", "is not a trace (it begins with 'a,b,c')"),
        ("x.csv", b"a,b\n1,2\n1,3\n", "its first column does not ascend"),
        ("x.csv", b"1\n2\n-3\n", "a count is below 0"),
        ("x.csv", b"1\n2\ninf\n", "a count is below 0 or no number"),
        ("x.csv", b"1 2 -3", "a count is below 0 or no number"),
        ("x.csv", b"1 2 nan", "a count is below 0 or no number"),
        ("x.csv", b"minute_1,minute_2\n-1,2\n", "a count is below 0 or no number"),
        ("x.csv", b"minute_1,minute_2\nnan,2\n", "a count is below 0 or no number"),
        ("x.csv", b"minute,count\n0,1\nnan,1\n", "its first column does not ascend"),
        ("x.csv", b"TIMESTAMP,n\n,1\n2023-11-16 18:00:00.0,2\n", "a time must look like 2023-11-16 18:00:00.0, not ''"),
        ("x.csv", b"1 2\n3\n", "its lines have different numbers of columns"),
        ("x.bz2", b"nothing", "is not a trace"),
        ("x.csv", b"TIMESTAMP\nhello\n", "is not a trace"),
        ("x.csv", b"TIMESTAMP\n1700000000\n1700000002\n", "a time must look like 2023-11-16 18:00:00.0, not '17"),
        ("x.csv", b"TIMESTAMP\n", "is not a trace"),
        ("x.csv", b"TIMESTAMP\n2023-11-16 18:00:00.0\n", "a trace needs at least two different times"),
        ("x.csv", b"minute,count\n0,1\n1\n", "is not a trace"),
        ("x.csv", b"minute,count\n0,0\n", "holds no arrival"),
        ("x.csv", b"minute_1,minute_2\n1,x\n", "is not a trace"),
        ("x.png", b"\x89PNG", "is not a trace"),
        ("x.tbz2", b"nothing", "is not a trace"),
        ("", b"", "cannot read the trace"),
    ],
)
def test_a_file_that_is_no_trace_is_reported(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        trace(tmp_path / name, 1, 1)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_survival_is_that_of_the_profile(shares: list[float]) -> None:
    profile = ExitProfile((1.0, *sorted(shares, reverse=True)))
    blocks = exit_blocks(profile, 4000, np.random.default_rng(0))
    survived = [(blocks >= k).mean() for k in range(profile.num_blocks)]
    assert survived == pytest.approx(profile.survival, abs=0.05)


def test_a_mix_that_switches_gets_harder_at_once() -> None:
    mix = Mix(ExitProfile((1.0, 0.0)), ExitProfile((1.0, 1.0)), ((0.0, 0.8), (10.0, 0.2)))
    times = np.linspace(0, 20, 4000, endpoint=False)
    hard = mix.exit_blocks(times, np.random.default_rng(0))
    assert hard[:2000].mean() == pytest.approx(0.2, abs=0.04)
    assert hard[2000:].mean() == pytest.approx(0.8, abs=0.04)
