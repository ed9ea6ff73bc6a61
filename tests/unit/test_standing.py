"""What names tell of ages, held against each name by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dropq.diagnosis.standing import AGES, DEATHS, Marks, Waiting, age_class
from dropq.format import names
from dropq.format.message_file import MessageFile

NOW = 1_795_940_105_402


def since(file: str) -> int:
    """Since when a message waits; a name that does not say so is that of a file of a day ago."""
    known = names.since_at_a_glance(file)
    name = MessageFile(file).name
    return known if known is not None else name.since or name.timestamp or NOW - 86_400_000 - len(file)


def name_of(chance: random.Random) -> str:
    """A name of any form: plain, of several priorities, with markers, foreign, and foreign ones like coded ones."""
    ms = NOW - int(10 ** chance.uniform(0, 9))
    id = f"{ms:013d}{chance.randrange(1000):03d}-{chance.randrange(10**10):010d}"
    plain = f"{chance.choice((4, 4, 4, 0, 9, 10, -3))}.{id}.B"
    later = ms + chance.randrange(1000)
    marks = (
        "JMS_dropq_copyS=0123456789abcdef",
        "JMS_dropq_diedI=7",
        f"JMS_dropq_sinceL={later:013d}",
        "JMS_dropq_diedI=2",
        "JMS_dropq_reasonS=failed",
    )
    return chance.choice(
        (
            *(plain,) * 8,
            *(f"{plain}.....{mark}" for mark in marks),
            f"{plain}.type=a~b",
            f"{plain}\n{plain}",
            f"x\n{plain}",
            f"x{plain}",
            f"\N{ARABIC-INDIC DIGIT FOUR}{plain[1:]}",
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
    marks = Marks()
    waiting = Waiting(NOW, since, marks, kept=70)
    for start in range(0, len(files), 50):
        waiting.add(files[start : start + 50])
    assert waiting.count == len(files) and waiting.first == files[:70]
    assert waiting.oldest is not None
    assert waiting.oldest[0] == since(waiting.oldest[1]) == min(map(since, files))
    ages = Counter(age_class((NOW - since(file)) / 1000) for file in files)
    assert waiting.ages == [ages[place] for place in range(len(AGES) + 1)]
    deaths = [MessageFile(file).name.died for file in files]
    assert marks.letters == sum(names.is_letter(file) is not None for file in files)
    assert marks.killers == sum(died >= DEATHS for died in deaths)
    assert marks.worst[0] == max([0, *(died for died in deaths if died >= DEATHS)])


def test_a_foreign_name_that_begins_like_a_coded_one_is_as_old_as_its_file() -> None:
    waiting = Waiting(NOW, since, Marks())
    waiting.add(["7.9876543210.pdf", f"4.{NOW - 5000}000-0000000000.B"])
    assert waiting.oldest == (since("7.9876543210.pdf"), "7.9876543210.pdf")
    assert waiting.ages == [0, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "second", ["4.1795940105402001-3959586867.B\n4.1795940105402001-3959586867.B", "\n4.1795940105402001-3959586867.B"]
)
def test_a_name_with_a_newline_stands_for_no_other(second: str) -> None:
    plain = "4.1795940105402001-3959586867.B"
    assert names.sent_together([plain, f"{plain}.x"]) == [NOW, NOW]
    assert names.sent_together(["x.pdf", second]) is None


def test_an_age_counts_with_the_first_that_it_is_not_over() -> None:
    assert [age_class(seconds) for seconds in (-5, 0, 1, 1.001, 60, 60.5, 86_400, 86_401)] == [0, 0, 0, 1, 2, 3, 6, 7]
