"""Plan the rounds that remeasure disturbed trials at the end of a search or of the finals."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from sweeper.common.trials import TrialRecord

MOST_ROUNDS = 3
HELPED = 0.75  # if more than this fraction of a round stays disturbed, a third round would not help either
SHORT_S = 60.0  # all rounds together may take as long as the search did, or this long if the search was shorter


def choose_again(
    disturbed: Sequence[TrialRecord], records: Mapping[int, TrialRecord], again: Collection[int], gangs: int
) -> list[TrialRecord]:
    """Return the disturbed trials that the next round should remeasure.

    The time of earlier rounds counts toward the limit, so a resumed sweep continues with the remaining time.

    Args:
        records: the trials of the search or of the finals by number, in the order in which they ended.
        again: the numbers of the trials that earlier rounds remeasured.
        gangs: the number of trials that run in parallel.
    """
    rounds: dict[int, int] = {}  # the round of each trial; 0 is the search itself
    seconds = {True: 0.0, False: 0.0}  # total duration of the rounds, and of the search itself
    for number, record in records.items():
        is_again = record.retry is not None and record.retry.trial in again
        rounds[number] = rounds.get(record.retry.trial, 0) + 1 if record.retry and is_again else 0
        seconds[is_again] += record.duration_s
    # Count rounds per trial, because the new trials of an extended search have not been in any round.
    sizes, still = Counter(rounds.values()), Counter(rounds[record.number] for record in disturbed)
    last = MOST_ROUNDS - 1
    most = MOST_ROUNDS if still[last] <= HELPED * sizes[last] else last
    left_s = max(gangs * SHORT_S, seconds[False]) - seconds[True]
    chosen = list[TrialRecord]()
    for record in disturbed:
        if rounds[record.number] < most and record.duration_s <= left_s:
            chosen.append(record)
            left_s -= record.duration_s
    return chosen
