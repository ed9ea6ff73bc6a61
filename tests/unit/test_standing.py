"""What names tell of ages, held against each name by itself."""

from __future__ import annotations

import random
import re

import pytest

from dropq.diagnosis.standing import AGES, Waiting, age_class
from dropq.format import names
from dropq.format.message_file import MessageFile

NOW = 1_795_940_105_402


def since(file: str) -> int:
    """Since when a message waits; a name that does not say so is that of a file of a day ago."""
    known = names.since_at_a_glance(file)
    name = MessageFile(file).name
    return known if known is not None else name.since or name.timestamp or NOW - 86_400_000 - len(file)


def told(file: str) -> int:
    """The time that a name's age is told by: a foreign name that begins like a coded one counts by that."""
    return (
        int(file[2:12]) * 1000 if re.match(r"[0-9]\.[0-9]{10}", file) and not names.tells_since(file) else since(file)
    )


def name_of(chance: random.Random) -> str:
    """A name of any form: plain, of several priorities, with markers, foreign, and foreign ones like coded ones."""
    ms = NOW - int(10 ** chance.uniform(0, 9))
    id = f"{ms:013d}{chance.randrange(1000):03d}-{chance.randrange(10**10):010d}"
    plain = f"{chance.choice((4, 4, 4, 0, 9, 10, -3))}.{id}.B"
    later = ms + chance.randrange(1000)
    marks = (f"JMS_dropq_sinceL={later:013d}", "JMS_dropq_diedI=2", "JMS_dropq_reasonS=failed")
    return chance.choice(
        (
            *(plain,) * 8,
            *(f"{plain}.....{mark}" for mark in marks),
            f"report-{ms}.csv",
            f"4.{ms}",
            f"4.{chance.randrange(10**9):010d}.csv",
            f"x.{ms}000-0000000000.B",
            "x",
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_ages_and_the_oldest_are_those_of_the_names_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    files = [name_of(chance) for _ in range(chance.choice((1, 3, 200)))]
    waiting = Waiting(NOW, since)
    for start in range(0, len(files), 50):
        waiting.add(files[start : start + 50])
    assert waiting.count == len(files)
    assert waiting.oldest == min((since(file), file) for file in files)[:1] + (waiting.oldest or ("",))[1:]
    assert waiting.letters == sum(names.is_letter(file) is not None for file in files)
    assert sorted(waiting.deaths) == sorted(filter(names.may_have_deaths, files))
    sooner, later = ([age_class((NOW - told(file) + shift) / 1000) for file in files] for shift in (-1001, 1001))
    for place in range(len(AGES) + 1):  # the ages of names that tell their time are told to a second
        at_most = sum(waiting.ages[: place + 1])
        assert sum(each <= place for each in later) <= at_most <= sum(each <= place for each in sooner)


def test_an_age_counts_with_the_first_that_it_is_not_over() -> None:
    assert [age_class(seconds) for seconds in (-5, 0, 1, 1.001, 60, 60.5, 86_400, 86_401)] == [0, 0, 0, 1, 2, 3, 6, 7]
