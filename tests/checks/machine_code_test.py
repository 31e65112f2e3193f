#!/usr/bin/env python3
"""Tests the counts of tools/checks/machine_code.py on hand-written lines of machine code."""
import pathlib
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools/checks"))
import check_machine_code  # noqa: E402
import machine_code  # noqa: E402


def function(*lines: str) -> machine_code.Function:
    text = "\tcode for sm_90\n\t\tFunction : kernel\n"
    for number, line in enumerate(lines):
        text += f"        /*{16 * number:04x}*/                   {line} ;     /* 0x0 */\n"
        text += " " * 60 + "/* 0x000fe20000000800 */\n"
    return machine_code.functions(text)[0]


class MachineCodeTest(unittest.TestCase):
    def hot(self, *lines: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(**machine_code.measure(function(*lines))["hot"])

    def test_loads_of_several_rows_before_the_first_use_are_all_in_flight(self):
        hot = self.hot("LDG.E.128 R8, desc[UR4][R2.64]", "LDG.E.128 R12, desc[UR4][R4.64]",
                       "LDG.E.64 R16, desc[UR4][R6.64]", "FADD R20, R8, R12",
                       "STG.E.128 desc[UR4][R2.64], R20", "EXIT")
        self.assertEqual((hot.in_flight, hot.loads, hot.stores, hot.instructions), (40, 40, 16, 6))

    def test_a_store_of_what_was_loaded_comes_before_the_next_load(self):
        hot = self.hot("LDG.E.128 R8, desc[UR4][R2.64]", "STG.E.128 desc[UR4][R4.64], R8",
                       "LDG.E.128 R12, desc[UR4][R2.64+0x400]", "STG.E.128 desc[UR4][R4.64+0x400], R12",
                       "EXIT")
        self.assertEqual(hot.in_flight, 16)

    def test_a_store_waits_for_all_four_registers_of_its_value(self):
        hot = self.hot("LDG.E R11, desc[UR4][R2.64]", "STG.E.128 desc[UR4][R4.64], R8",
                       "LDG.E R12, desc[UR4][R2.64]", "EXIT")
        self.assertEqual(hot.in_flight, 4)

    def test_what_a_loop_fetches_for_its_next_turn_is_in_flight(self):
        hot = self.hot("LDG.E.128 R8, desc[UR4][R2.64]", "FADD R20, R12, R12",
                       "LDG.E.128 R12, desc[UR4][R2.64+0x10]", "FADD R21, R8, R8", "@P0 BRA 0x0", "EXIT")
        self.assertTrue(hot.is_loop)
        self.assertEqual(hot.in_flight, 32)

    def test_copies_to_shared_memory_that_a_loop_does_not_wait_for_are_in_flight(self):
        hot = self.hot("LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]", "LDGSTS.E [R5+0x10], desc[UR4][R4.64]",
                       "LDGDEPBAR", "DEPBAR.LE SB0, 0x6", "LDS.128 R8, [R6]", "@P0 BRA 0x0", "EXIT")
        self.assertEqual((hot.loads, hot.wide_loads), (20, 1))
        self.assertEqual(hot.in_flight, 7 * 16)

    def test_the_hot_loop_moves_most_in_16_byte_accesses_and_is_the_inner_one(self):
        hot = self.hot("MOV R1, R2", "LDG.E.128 R8, desc[UR4][R2.64]", "@P1 BRA 0x10", "@P0 BRA 0x0",
                       "LDG.E R9, desc[UR4][R2.64]", "@P2 BRA 0x40", "EXIT")
        self.assertEqual((hot.instructions, hot.loads), (2, 16))

    def test_the_whole_kernel_counts_where_its_loops_move_little(self):
        hot = self.hot("LDG.E.128 R8, desc[UR4][R2.64]", "STG.E.128 desc[UR4][R4.64], R8",
                       "LDG.E R9, desc[UR4][R2.64]", "@P2 BRA 0x20", "EXIT", "BRA 0x50")
        self.assertFalse(hot.is_loop)
        self.assertEqual(hot.instructions, 5)

    def test_adjacent_stores_of_one_thread_fill_half_sectors(self):
        self.assertEqual(self.hot("STG.E.128 desc[UR4][R2.64], R8", "STG.E.128 desc[UR4][R2.64+0x10], R12",
                                  "EXIT").half_sector, 1)
        self.assertEqual(self.hot("STG.E.128 desc[UR4][R2.64+-0x10], R8", "STG.E.128 desc[UR4][R2.64], R12",
                                  "EXIT").half_sector, 1)
        self.assertEqual(self.hot("STG.E.128 desc[UR4][R2.64], R8", "STG.E.128 desc[UR4][R2.64+0x200], R12",
                                  "EXIT").half_sector, 0)

    def test_vectors_stored_word_by_word_are_found(self):
        load = "LDG.E.128 R8, desc[UR4][R2.64]"
        words = [f"STG.E desc[UR4][R4.64+{4 * i:#x}], R{8 + i}" for i in (2, 0, 3, 1)]

        def found(*lines: str) -> tuple[int, set[str]]:
            measured = machine_code.measure(function(load, *lines, "EXIT"))
            figures = check_machine_code.figures({"REG": 32, "SHARED": 0, **measured}, 256, 0)
            return measured["hot"]["by_words"], figures.found

        self.assertEqual(found(*words), (1, {"words"}))
        self.assertEqual(found(*words, "STG.E desc[UR4][R4.64+0x10], R12"), (1, {"words"}))
        self.assertEqual(found(*words[1:]), (0, set()))
        self.assertEqual(found(*(line.replace("R4.64", f"R{4 + 2 * (i % 2)}.64")
                                 for i, line in enumerate(words))), (0, set()))
        # A kernel has a path for arrays that are not aligned.
        self.assertEqual(found("STG.E.128 desc[UR4][R4.64], R8", *words), (1, set()))

    def test_calls_and_local_memory_are_found(self):
        measured = machine_code.measure(
            function("LDL R4, [R1]", "STL [R1+0x4], R4", "CALL.REL.NOINC 0x40", "EXIT"))
        self.assertEqual((measured["local"], measured["hot"]["calls"]), (2, 1))

    def test_a_kernel_waits_before_it_branches_or_accesses_global_memory(self):
        load, wait, leave = "LDG.E R4, desc[UR4][R2.64]", "ACQBULK", "EXIT"
        for code, waits in (((wait, load, leave), True), ((load, wait, leave), False), ((leave, wait), False),
                            (("@P0 ACQBULK", load), False), ((load, leave), False)):
            self.assertEqual(machine_code.measure(function(*code))["waits"], waits, code)

    def test_predicated_instructions_are_read(self):
        code = function("@!P0 LDG.E.U16 R8, desc[UR4][R2.64]", "@UP1 UMOV UR4, 0x1", "EXIT").code
        self.assertEqual([i.predicate for i in code], ["!P0", "UP1", None])
        self.assertEqual(code[0].bytes, 2)

    def test_the_table_keeps_what_was_measured_for_one_op(self):
        page = "| a_kernel(Merge) | 2 | 40 | 48 | 24 (16) | 2.7 | 92 | 97 % | divisions |\n" \
               "| `a_kernel` | `a.cu` | yes | yes | yes | yes | 60 to 97 % | 70 % |\n" \
               "| `b_kernel` | `a.cu` | yes | yes | yes | yes | - | 70 % |"
        measured = check_machine_code.measurements(page)
        self.assertEqual(measured, {"a_kernel(Merge)": "97 %", "a_kernel": "60 to 97 %",
                                    "b_kernel": "H100: 70 %"})
        figures = check_machine_code.Figures(registers=40)
        written = check_machine_code.table({"a_kernel(Merge)": figures, "a_kernel(Split)": figures}, {},
                                           measured, "13.0")
        self.assertRegex(written, r"\(Merge\).*\| 97 % \|  \|\n.*\(Split\).*\| not timed \|  \|")

    def test_a_table_is_out_of_date_with_other_words_or_figures_that_registers_do_not_explain(self):
        row = "| a_kernel | 2 | 40 | 48 | 24 (16) | 0.5 | 92 | 97 % | divisions |\n"
        for other, expected in ((row, False), (row.replace("40 | 48", "44 | 40"), False),
                                (row.replace("0.5", "0.6"), False), (row.replace("40 |", "48 |"), True),
                                (row.replace("0.5", "0.7"), True), (row.replace("97 %", "98 %"), True),
                                (row.replace("a_", "b_"), True), (row + row, True), ("", True)):
            self.assertEqual(check_machine_code.differs(row, other), expected, other)


if __name__ == "__main__":
    unittest.main()
