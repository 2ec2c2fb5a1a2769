"""The console: what it writes, character by character."""

import io
import re
from dataclasses import replace

import pytest
from observing import Clock, event

from shoal.observe.clean import clean, columns, fit, last_state
from shoal.observe.console import PLAIN_SECONDS, Console
from shoal.observe.status import count, duration, number, progress_text

PROGRESS = {
    "step": 120,
    "num_steps": 500,
    "epoch": 1,
    "loss": 1.234,
    "samples_per_second": 3412.0,
    "workers": 2,
    "eta_seconds": 42.0,
    "compute": 0.82,
    "wait": 0.06,
    "communicate": 0.09,
    "load": 0.03,
}


class Screen:
    """A console on a stream in memory, with a clock and a width to turn."""

    def __init__(self, num_workers=1, *, is_tty=False, width=80, **options):
        self.stream, self.clock, self.width = io.StringIO(), Clock(), width
        self.console = Console(
            self.stream, num_workers=num_workers, is_tty=is_tty, width=lambda: self.width, clock=self.clock, **options
        )

    @property
    def text(self):
        return self.stream.getvalue()

    def wait(self, seconds):
        self.clock.now += seconds
        self.console.tick()

    def progress(self, rank=0, **changes):
        self.console.progress(event("progress", rank=rank, **{**PROGRESS, **changes}))

    def rows(self):
        """What a terminal would show: carriage returns, erasing a line and moving up are carried out."""
        rows, row = [""], 0
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.text):
            if part == "\n":
                row += 1
                rows[row:] = rows[row:] or [""]
            elif part.endswith("A") and part[0] == "\x1b":
                row = max(0, row - int(part[2:-1]))
            elif part == "\x1b[J":
                rows[row:] = [""]
            elif part in ("\x1b[K", "\r"):
                rows[row] = "" if part == "\x1b[K" else rows[row]
            elif not part.startswith("\x1b"):
                rows[row] += part
        return rows


class TestLines:
    def test_one_worker_has_no_prefix_and_no_delay(self):
        screen = Screen()
        screen.console.feed(0, b"hello\nwor")
        assert screen.text == "hello\n"
        screen.console.feed(0, b"ld\n\n")
        assert screen.text == "hello\nworld\n\n"

    def test_several_workers_have_prefixes(self):
        screen = Screen(2)
        screen.console.line(0, "a")
        screen.console.line(1, "b")
        screen.wait(0.2)
        assert screen.text == "[0] a\n[1] b\n"

    def test_equal_lines_are_folded(self):
        screen = Screen(4)
        for rank in range(4):
            screen.console.feed(rank, b"epoch 1\n")
        assert screen.text == "[0-3] epoch 1\n"

    def test_a_line_is_held_back_no_longer_than_promised(self):
        screen = Screen(2)
        screen.console.line(0, "a")
        due = screen.console.next_tick()
        assert 0 < due <= 0.2
        screen.wait(due)
        assert screen.text == "[0] a\n"
        assert screen.console.next_tick() is None

    def test_prefixes_are_coloured_on_a_terminal_only(self):
        screen = Screen(2, is_tty=True)
        screen.console.line(0, "a")
        screen.wait(0.2)
        assert screen.text == "\x1b[36m[0] \x1b[0ma\n"

    def test_what_a_worker_leaves_without_a_newline_is_printed_when_it_ends(self):
        screen = Screen(2)
        screen.console.feed(0, b"half")
        screen.console.end(0)
        screen.wait(0.2)
        assert screen.text == "[0] half\n"

    def test_closing_prints_what_is_held_back(self):
        screen = Screen(2)
        screen.console.line(0, "held")
        screen.console.feed(1, b"half")
        screen.console.close()
        screen.console.close()
        assert screen.text == "[0] held\n[1] half\n"

    def test_a_note_comes_after_the_lines_before_it(self):
        screen = Screen(2)
        screen.console.line(0, "before")
        screen.console.note("error: one\n  why: two")
        assert screen.text == "[0] before\nerror: one\n  why: two\n"

    def test_text_that_is_not_utf8_is_shown_as_far_as_possible(self):
        screen = Screen()
        screen.console.feed(0, "grün ".encode() + b"\xff\xfe\n")
        assert screen.text == "grün \ufffd\ufffd\n"

    def test_a_character_cut_between_two_reads_is_whole(self):
        screen = Screen()
        for byte in "fish 🐟\n".encode():
            screen.console.feed(0, bytes([byte]))
        assert screen.text == "fish 🐟\n"

    def test_a_line_without_end_is_printed_in_pieces(self):
        screen = Screen()
        for _ in range(40):
            screen.console.feed(0, b"x" * 10_000)
        screen.console.close()
        assert screen.text.replace("\n", "") == "x" * 400_000
        assert max(map(len, screen.text.split("\n"))) < 100_000

    def test_a_hundred_thousand_lines(self):
        screen = Screen(4, is_tty=True)
        block = b"".join(b"line %d of some output\n" % number for number in range(500))
        for _ in range(100):
            for rank in range(2):
                screen.console.feed(rank, block)
        screen.console.close()
        assert screen.text.count("\n") >= 50_000

    def test_a_flood_of_alternating_lines_is_not_slow(self):
        screen = Screen(2)
        for number_ in range(20_000):
            screen.console.feed(0, b"same\nrank 0 line %d\n" % number_)
            screen.console.feed(1, b"same\nrank 1 line %d\n" % number_)
        screen.console.close()
        assert screen.text.count("same\n") < 40_000


class TestProgressBars:
    def test_only_the_last_state_of_a_bar_is_printed(self):
        screen = Screen()
        screen.console.feed(0, b"\r 10%|#   |\r 50%|##  |\r100%|####|\nnext\r\n")
        assert screen.text == "100%|####|\nnext\n"

    def test_a_bar_that_was_wiped_leaves_what_came_after_it(self):
        assert last_state("\r 10%|#   |\r          \rdone") == "done"

    def test_a_bar_of_hours_takes_no_memory(self):
        screen = Screen()
        for step in range(100_000):
            screen.console.feed(0, b"\r%6d steps" % step)
        assert len(screen.console._partial[0]) < 30
        screen.console.close()
        assert screen.text == " 99999 steps\n"

    def test_a_bar_is_shown_live_where_there_is_no_progress_of_our_own(self):
        screen = Screen(2, is_tty=True)
        screen.console.feed(1, b"\r 50%|##  |")
        assert screen.rows() == ["[1] 50%|##  |"]
        screen.wait(1)
        screen.console.feed(1, b"\r100%|####|\n")
        screen.wait(1)
        assert screen.rows() == ["[1] 100%|####|", ""]


class TestProgress:
    def test_the_line_says_everything_where_there_is_room(self):
        assert progress_text({0: PROGRESS}) == (
            "step 120/500  epoch 1  loss 1.234  3.4k samples/s  2 workers  eta 0:42"
            "  compute 82% wait 6% comm 9% load 3%"
        )

    def test_eighty_columns_hold_what_matters(self):
        text = progress_text({0: PROGRESS}, 79)
        assert text == "step 120/500  loss 1.234  3.4k/s  2w  eta 0:42  compute 82 wait 6 comm 9 load 3"

    def test_small_shares_of_time_go_before_large_ones(self):
        texts = [progress_text({0: PROGRESS}, width) for width in (75, 70, 62, 55, 40, 24, 15)]
        assert [text.partition("eta 0:42")[2].strip() for text in texts] == [
            "compute 82 wait 6 comm 9 load 3",
            "compute 82 wait 6 comm 9",
            "compute 82 comm 9",
            "compute 82",
            "",
            "",
            "",
        ]
        assert texts[-2:] == ["step 120/500  loss 1.234", "step 120/500"]

    @pytest.mark.parametrize("width", range(130))
    def test_every_width_is_kept(self, width):
        big = {**PROGRESS, "step": 10**9, "num_steps": 10**10, "loss": -1e-300, "samples_per_second": 1e15}
        assert columns(progress_text({0: PROGRESS}, width)) <= width
        assert columns(progress_text({0: big, 1: PROGRESS}, width)) <= width

    def test_shares_are_the_mean_over_ranks(self):
        text = progress_text(
            {0: {**PROGRESS, "compute": 1.0, "wait": 0.0}, 1: {**PROGRESS, "compute": 0.5, "wait": 0.5}}
        )
        assert "compute 75% wait 25%" in text

    @pytest.mark.parametrize(
        "data", [{}, {"step": 3}, {"loss": "nan"}, {"eta_seconds": float("inf")}, {"step": None}]
    )
    def test_missing_and_odd_values_are_left_out(self, data):
        assert isinstance(progress_text({0: data}, 40), str)

    def test_a_terminal_has_one_line_below_all_others(self):
        screen = Screen(is_tty=True)
        screen.progress(step=1)
        screen.console.line(0, "printed")
        screen.wait(1)
        screen.progress(step=2)
        screen.console.note("noted")
        screen.wait(1)
        *above, last = screen.rows()
        assert above == ["printed", "noted"]
        assert last.startswith("step 2/500")

    def test_it_is_not_drawn_more_often_than_eyes_can_follow(self):
        screen = Screen(is_tty=True)
        for step in range(100):
            screen.clock.now += 0.001
            screen.progress(step=step)
        assert 1 <= screen.text.count("step ") <= 3

    def test_the_last_column_stays_free(self):
        for width in (80, 40, 20, 5, 1):
            screen = Screen(is_tty=True, width=width)
            screen.progress()
            assert columns(screen.text) < max(width, 1)

    def test_a_terminal_that_became_narrower_is_left_clean(self):
        screen = Screen(is_tty=True, width=120)
        screen.progress()
        screen.width = 40
        screen.wait(1)
        screen.progress()
        assert "\x1b[2A\x1b[J" in screen.text

    def test_closing_leaves_the_last_progress_on_its_own_line(self):
        screen = Screen(is_tty=True)
        screen.progress(step=1)
        screen.progress(step=500)
        screen.console.close()
        first, last = screen.rows()
        assert first.startswith("step 500/500  loss 1.234")
        assert "eta" not in first
        assert last == ""

    def test_the_cursor_is_never_hidden_nor_a_mode_changed(self):
        screen = Screen(2, is_tty=True)
        screen.progress()
        screen.console.feed(0, b"\x1b[?25l\x1b[?1049hx\n")
        screen.console.close()
        assert "\x1b[?" not in screen.text

    def test_elsewhere_it_is_a_plain_line_now_and_then(self):
        screen = Screen()
        for step in range(1, 2501):
            screen.clock.now += 0.01
            screen.progress(step=step)
            screen.console.tick()
        assert screen.text.count("\n") == int(25 / PLAIN_SECONDS)
        screen.console.close()
        assert "\x1b" not in screen.text
        assert screen.text.split("\n")[-2].startswith("step 2500/500")

    def test_a_short_run_elsewhere_still_says_how_it_ended(self):
        screen = Screen()
        screen.progress(step=500)
        screen.console.close()
        assert screen.text.startswith("step 500/500")

    def test_prints_of_the_own_process_step_around_it(self):
        screen = Screen(is_tty=True)
        screen.progress(step=1)
        screen.console.give_way(screen.stream, "half")
        screen.wait(1)
        screen.progress(step=2)
        assert screen.rows() == ["half"]
        screen.console.give_way(screen.stream, " and half\n")
        screen.wait(1)
        assert screen.rows()[0] == "half and half"
        assert screen.rows()[1].startswith("step 2/500")


class TestWorkersThatComeAndGo:
    def test_the_progress_of_a_lost_worker_is_not_that_of_the_run(self):
        screen = Screen(2, is_tty=True)
        screen.progress(rank=0, step=3)
        screen.progress(rank=1, step=5)
        screen.console.lose(0)
        screen.wait(1.0)
        assert screen.rows()[-1].startswith("step 5")

    def test_the_run_does_not_seem_to_go_back_when_its_lead_is_lost(self):
        """Others speak less often: what they said last is older."""
        screen = Screen(2, is_tty=True)
        shown = []
        for rank, generation, step, is_lead in [
            (1, 0, 90, False),
            (0, 0, 100, True),
            (None, 0, 0, False),
            (1, 1, 101, True),
            (0, 2, 104, False),
            (1, 2, 103, True),
            (0, 2, 108, False),
            (1, 2, 109, True),
        ]:
            if rank is None:
                screen.console.lose(0)
            else:
                moved = replace(event("progress", rank=rank, **{**PROGRESS, "step": step}), generation=generation)
                screen.console.progress(replace(moved, data={**moved.data, "is_lead": is_lead}))
            screen.wait(1.0)
            shown.append(int(screen.rows()[-1].partition("/")[0].removeprefix("step ")))
        assert shown == [90, 100, 100, 101, 101, 103, 103, 109]

    def test_shares_are_those_of_workers_that_are_there(self):
        rows = {0: {**PROGRESS, "wait": 0.9, "is_lost": True}, 1: {**PROGRESS, "wait": 0.1}}
        assert "wait 10%" in progress_text(rows)

    def test_the_last_progress_stays_if_nobody_is_left(self):
        screen = Screen(1, is_tty=True)
        screen.progress(rank=0, step=3)
        screen.console.lose(0)
        screen.wait(1.0)
        assert screen.rows()[-1].startswith("step 3")

    def test_lines_wait_for_as_many_as_there_are(self):
        screen = Screen(3)
        screen.console.lose(2)
        for rank in (0, 1):
            screen.console.feed(rank, b"a\n")
        assert screen.text == "[0-1] a\n"
        screen.console.begin(2)
        for rank in (0, 1):
            screen.console.feed(rank, b"b\n")
        assert screen.text == "[0-1] a\n"
        screen.console.feed(2, b"b\n")
        assert screen.text == "[0-1] a\n[0-2] b\n"


class TestHostileOutput:
    @pytest.mark.parametrize(
        ("text", "plain"),
        [
            ("\x1b[31mred\x1b[0m", "red"),
            ("\x1b[2J\x1b[1;1Hgone", "gone"),
            ("\x1b]0;title\x07text", "text"),
            ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x1b]52;c;ZXZpbA==", ""),
            ("\x1bPq#0\x1b\\after", "after"),
            ("\x1b(B\x1b=\x1bcreset", "reset"),
            ("bell\x07 back\x08 nul\x00 del\x7f", "bell^G back^H nul^@ del^?"),
            ("\x9b31mC1\x9d0;t\x9c \x85", "C1 \\x85"),
            ("user\u202egnp.exe\u2066", "user\\u202egnp.exe\\u2066"),
            ("\x1b", "^["),
            ("\x1b\x1b[A[31m", "^[[31m"),
            ("\x1b[31", "^[[31"),
            ("tab\tstays", "tab\tstays"),
            ("日本語 é 🐟", "日本語 é 🐟"),
        ],
    )
    def test_it_can_do_nothing_but_be_seen(self, text, plain):
        assert clean(text) == plain

    def test_colours_stay_on_a_terminal_and_end_with_the_line(self):
        screen = Screen(is_tty=True)
        screen.console.feed(0, b"\x1b[1;31mred\x1b[2J\x07\n")
        assert screen.text == "\x1b[1;31mred^G\x1b[0m\n"

    def test_every_byte_alone_and_doubled(self):
        allowed = re.compile(r"(?:\x1b\[[0-9;:]*m|[^\x00-\x08\x0b-\x1f\x7f-\x9f])*")
        for first in range(256):
            for second in (*b"[]PX^_(\x1b\x9b;m\r", first):
                screen = Screen(is_tty=True)
                screen.console.feed(0, bytes([first, second]) + b"31mtext\n")
                assert allowed.fullmatch(screen.text), (first, second, screen.text)

    def test_a_bar_cannot_smuggle_sequences_into_the_status(self):
        screen = Screen(is_tty=True)
        screen.console.feed(0, b"\r\x1b[2J\x1b]0;x\x07 50%")
        assert screen.text == "50%"


class TestBrokenStreams:
    def test_a_stream_that_breaks_is_left_alone(self):
        class Broken(io.StringIO):
            def write(self, text):
                raise BrokenPipeError

        console = Console(Broken(), is_tty=True)
        console.line(0, "x")
        console.progress(event("progress", **PROGRESS))
        console.close()

    def test_a_closed_stream_is_left_alone(self):
        stream = io.StringIO()
        console = Console(stream, is_tty=False)
        stream.close()
        console.line(0, "x")
        console.close()

    def test_a_terminal_that_knows_no_unicode_gets_what_it_can_show(self):
        raw = io.BytesIO()
        console = Console(io.TextIOWrapper(raw, encoding="ascii"), is_tty=False)
        console.line(0, "fish 🐟")
        assert raw.getvalue() == b"fish ?\n"
        console.close()


def test_numbers_are_short():
    assert [number(value) for value in (1.2, 0.012, 1234.5, 123456.0, "nan")] == [
        "1.200",
        "0.01200",
        "1234",
        "1.235e+05",
        "nan",
    ]
    assert [count(value) for value in (0.5, 9.94, 950, 3412, 1.2e6, 250e6, 3e9)] == [
        "0.5",
        "9.9",
        "950",
        "3.4k",
        "1.2M",
        "250M",
        "3.0G",
    ]
    assert [duration(value) for value in (0, 42, 62, 3723, 200_000, float("nan"))] == [
        "0:00",
        "0:42",
        "1:02",
        "1:02:03",
        "2d 7h",
        "?",
    ]


def test_text_is_cut_by_what_it_takes_on_the_screen():
    assert fit("日本語", 5) == "日本…"
    assert fit("\x1b[31mred\x1b[0m", 3) == "\x1b[31mred\x1b[0m"
    assert fit("abc", 0) == ""
    assert columns("e\u0301") == 1
