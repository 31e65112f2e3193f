#!/usr/bin/env python3
"""`gradwire report` and `gradwire export`: the page's document, bad input, and the page in Chromium."""
import base64
import csv
import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import unittest

from command import CommandTest, SYNTHETIC, main

LARGEST_PAGE = 6_000_000
THEMES = {"light": 255, "dark": 20}  # red of the background
has_plotly = importlib.util.find_spec("plotly") is not None
has_browser = (has_plotly and shutil.which("chromium") and shutil.which("chromedriver")
               and importlib.util.find_spec("selenium") is not None)


class ReportTest(CommandTest):
    def environment(self, more=None):
        return super().environment({"GRADWIRE_PYTHON": sys.executable, **(more or {})})

    def write_log(self, name, compression, seed=0, steps=50, loss=2.0, **config):
        """Writes a log of a run whose rank 1 is a straggler."""
        records = [{"type": "run", "schema": 1, "version": "0", "model": {"name": "vit_tiny"}, "ranks": 3,
                    "data": "synthetic", "device": "host", "compression": compression, "bucket_mb": 25,
                    "parameters": 1000, "schedule": "ring", "seed": seed, **config}]
        records += [{"type": "step", "step": s, "loss": loss * 0.97 ** s + 0.2 * (s % 2), "lr": 0.1,
                     "step_ms": 10, "images_per_s": 100, "wire_bytes": 500, "dense_bytes": 4000,
                     "forward_ms": 2, "backward_ms": 4, "exposed_comm_ms": 3, "compress_ms": 1}
                    for s in range(steps)]
        records += [{"type": "waits", "step": steps, "seconds": 0.5,
                     "waited_s": [[0, .2, 0], [.01, 0, .01], [.1, .1, 0]]},
                    {"type": "eval", "step": steps, "test_accuracy": 0.8 + 0.02 * seed, "test_loss": 1}]
        (self.folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
        return self.folder / name

    def write_comparison(self, name="out.json"):
        """Writes three specs with two seeds each, and a log for each run."""
        rows, number = [], 0
        for spec, sent, accuracy in (("fp32", 4000, 0.9), ("int8", 1000, 0.89),
                                     ("powersgd:rank=4", 300, 0.85)):
            seeds = []
            for seed in range(2):
                log = self.write_log(f"out.{number}.jsonl", spec, seed, loss=3 - 2 * accuracy)
                seeds.append({"seed": seed, "test_accuracy": accuracy + 0.01 * seed, "final_loss": 1.0,
                              "log": log.name})
                number += 1
            rows.append({"compression": spec, "test_accuracy": accuracy + 0.005, "test_accuracy_std": 0.007,
                         "final_loss": 1.0, "step_ms": 10 + sent / 1000, "images_per_s": 100,
                         "ratio": 4000 / sent, "wire_bytes": sent, "wire_bytes_per_element": sent / 1000,
                         "dense_bytes": 4000,
                         "exposed_comm_ms": 3, "ranks": 3, "device": "host", "schedule": "ring",
                         "link": "150Mbit", "target_accuracy": 0.84, "seconds_to_target": sent / 100,
                         "bucket_mb": 25, "seeds": seeds})
        (self.folder / name).write_text(json.dumps(rows))

    def report(self, *files, name="report.html"):
        result = self.succeed("report", *files, "-o", name)
        self.assertIn(f"Report: {name}, ", result.stdout)
        page = (self.folder / name).read_text()
        self.assertLess(len(page.encode()), LARGEST_PAGE)
        packed = re.search(r'<script id="document" type="application/gzip">(.*?)</script>', page)[1]
        return json.loads(gzip.decompress(base64.b64decode(packed)))


@unittest.skipUnless(has_plotly, "plotly is not installed")
class Document(ReportTest):
    def test_a_comparison_with_its_logs(self):
        self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 3, "--seeds", 2, "--compression",
                         "fp32", "--compression", "int8", "--json", "out.json")
        document = self.report("out.json", "out.1.jsonl")  # a log that the comparison has already
        self.assertEqual([row["label"] for row in document["rows"]], ["fp32", "int8"])
        self.assertEqual([[s["run"] for s in row["seeds"]] for row in document["rows"]], [[0, 1], [2, 3]])
        entry = json.loads((self.folder / "out.json").read_text())[1]
        row = document["rows"][1]
        self.assertAlmostEqual(row["accuracy"], entry["test_accuracy"])
        self.assertAlmostEqual(row["accuracy_std"], entry["test_accuracy_std"])
        self.assertEqual(row["wire_bytes"], entry["wire_bytes"])
        run = document["runs"][0]
        steps = [r for r in self.records(run["log"]) if r["type"] == "step"]
        serial = sum(run["parts"][name] for name in (*document["parts"], "other"))
        self.assertAlmostEqual(serial, sum(s["step_ms"] for s in steps) / 3, places=3)
        self.assertEqual(run["curves"]["loss"]["step"], [1, 2, 3])
        self.assertEqual(len(run["curves"]["accuracy"]["value"]), 1)
        page = self.run_command("report", "out.json", "-o", "/dev/stdout").stdout
        self.assertTrue(page.startswith("<!doctype html>") and page.endswith("</html>\n"), page[:80])
        self.report("out.json", "out.1.jsonl", name="again.html")
        pages = [(self.folder / name).read_bytes() for name in ("report.html", "again.html")]
        self.assertEqual(*pages)

    def test_logs_are_grouped_by_their_settings(self):
        names = [self.write_log("a.jsonl", "int8", seed=0), self.write_log("b.jsonl", "int8", seed=1),
                 self.write_log("c.jsonl", "int8", seed=0, lr=0.5), self.write_log("d.jsonl", "fp32")]
        with names[3].open("a") as log:  # of a run in progress
            log.write('{"type": "step", "lo')
        document = self.report(*names)
        self.assertEqual([(row["label"], len(row["seeds"])) for row in document["rows"]],
                         [("int8 (a)", 2), ("int8 (c)", 1), ("fp32", 1)])
        self.assertAlmostEqual(document["rows"][0]["accuracy"], 0.81)
        self.assertAlmostEqual(document["rows"][0]["ratio"], 8)
        self.assertIn("Not finished: a.jsonl", document["notes"][0])
        self.assertEqual(document["runs"][0]["waits"]["straggler"]["rank"], 1)

    def test_any_text_in_files_and_names(self):
        for at, text in enumerate(("\u2028", "\u2029", "\x85", "\ufeff", "\ud800")):
            log = self.write_log(f"{at}.jsonl", "fp32", steps=2, data=f"cifar10:a{text}b", seed=2 ** 53 + 1)
            lines = [json.dumps(json.loads(line), ensure_ascii=text == "\ud800")
                     for line in log.read_text().splitlines()]
            log.write_text("\n".join(lines), encoding="utf-8-sig" if text == "\ufeff" else "utf-8")
            document = self.report(log.name)
            self.assertEqual(document["runs"][0]["config"]["data"], f"cifar10:a{text}b")
            self.assertEqual(document["rows"][0]["seeds"][0]["seed"], "9007199254740993")  # text: exact in JS
        self.write_comparison(os.fsdecode(b"\xe9.json"))
        self.report(os.fsdecode(b"\xe9.json"))

    def test_diverged_runs_are_named(self):
        document = self.report(self.write_log("a.jsonl", "int8", loss=math.nan),
                               self.write_log("b.jsonl", "int8", seed=1), self.write_log("c.jsonl", "fp32"))
        self.assertEqual([row["loss"] is None for row in document["rows"]], [True, False])
        self.assertEqual(document["notes"][1], "Diverged, the last loss is not finite: int8, seed 0.")

    def test_results_without_logs_and_benchmarks(self):
        self.write_comparison()
        for log in self.folder.glob("*.jsonl"):
            log.unlink()
        kernels = [{"op": "encode", "variant": "a", "cache": "warm", "copy_fraction": 0.5, "gbps": n,
                    "size_bytes": 2 ** n} for n in range(10, 20)]
        (self.folder / "kernels.json").write_text(json.dumps(kernels))
        document = self.report("out.json", "kernels.json")
        self.assertIn("6 of its logs", document["notes"][0])
        self.assertEqual(document["bench"][0]["rows"][0]["label"], "encode a warm")

    def test_long_logs_become_small_curves(self):
        document = self.report(self.write_log("long.jsonl", "fp32", steps=5001))
        self.assertLessEqual(len(document["runs"][0]["curves"]["loss"]["value"]), 1000)


class BadInput(ReportTest):
    def test_files_that_are_not_results(self):
        (self.folder / "binary").write_bytes(b"\x00\xff\xfe")
        for name, text in (("notes.txt", "of yesterday\n"), ("empty", ""), ("object.json", '{"a": 1}'),
                           ("numbers.json", "[1, 2]"), ("none.json", "[]"), ("deep.json", "[" * 100000)):
            (self.folder / name).write_text(text)
        os.mkfifo(self.folder / "fifo")
        log = self.write_log("broken.jsonl", "fp32")
        log.write_text(log.read_text().replace('{"type": "step", "step": 3,', "{", 1).replace("}", "", 1))
        before = self.files()
        for name in ("notes.txt", "empty", "object.json", "numbers.json", "none.json", "deep.json", "binary",
                     "broken.jsonl", "missing.json", "fifo", "."):
            with self.subTest(name):
                self.assert_refused(self.run_command("report", name), name)
                self.assert_refused(self.run_command("export", "--tensorboard", "events", name), name)
        self.assert_refused(self.run_command("report"), "FILE")
        self.assert_refused(self.run_command("export", "broken.jsonl"), "--tensorboard")
        self.assertEqual(self.files(), before)

    def test_outputs_that_cannot_be_written(self):
        self.write_comparison()
        before = (self.folder / "out.json").read_text()
        for words, part in ((("report", "out.json", "-o", "out.json"), "--output out.json are the same"),
                            (("report", "out.json", "-o", "none/a.html"), "none/a.html"),
                            (("export", "--tensorboard", "out.json", "out.0.jsonl"), "not a folder"),
                            (("export", "--tensorboard", "events", "out.json"), "not a run log")):
            self.assert_refused(self.run_command(*words), part)
        self.assertEqual((self.folder / "out.json").read_text(), before)

    def script(self, text):
        """Returns the path of a program in place of Python."""
        path = self.folder / f"python-{len(self.files())}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    @unittest.skipUnless(has_plotly, "plotly is not installed")
    def test_the_page_does_not_depend_on_the_environment(self):
        log = self.write_log("run.jsonl", "fp32")
        self.report(log)
        page = (self.folder / "report.html").read_bytes()
        (self.folder / "other").mkdir()
        for name in ("statistics", "html", "json", "numpy"):
            (self.folder / "other" / f"{name}.py").write_text("raise SystemExit(7)\n")
        (self.folder / "other" / "sitecustomize.py").write_text("print('hello')\n")
        for variables in ({"PYTHONUNBUFFERED": "1"}, {"PYTHONSAFEPATH": "1"}, {"PYTHONHOME": "/nowhere"},
                          {"PYTHONPATH": "other"}, {"PYTHONIOENCODING": "none"}, {"LC_ALL": "ja_JP.EUC-JP"},
                          {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
                          {"GRADWIRE_PYTHON": self.script(f'echo hi; exec "{sys.executable}" "$@"')}):
            with self.subTest(variables):
                self.succeed("report", log, "-o", "again.html", env=variables)
                self.assertEqual((self.folder / "again.html").read_bytes(), page)

    @unittest.skipUnless(has_plotly, "plotly is not installed")
    def test_an_incomplete_page_replaces_nothing(self):
        log = self.write_log("run.jsonl", "fp32")
        self.report(log)
        page = (self.folder / "report.html").read_bytes()
        half = self.script(f'"{sys.executable}" "$@" >whole; head -c 100000 whole')
        ignored = ["env", "--ignore-signal=CHLD", self.program, "report"]
        for words, python, code, part in (
                ([self.program, "report", log], "/usr/bin/true", 1, "/usr/bin/true ended with exit status 0"),
                ([self.program, "report", log], half, 1, "before all output"),
                ([self.program, "report", log], self.script("kill -KILL $$"), 1, "ended by signal 9"),
                ([*ignored, log], "/nowhere/python", 1, "/nowhere/python could not be started"),
                ([*ignored, log], self.script("kill -KILL $$"), 1, "ended by signal 9"),
                ([*ignored, self.folder / "empty"], sys.executable, 2, "not a result")):
            (self.folder / "empty").touch()
            export = [*words[:-2], "export", "--tensorboard", "events", words[-1]]
            for command in (words, *([export] if python != half else [])):
                with self.subTest(words=command, python=python):
                    result = self.run_words(*command, env={"GRADWIRE_PYTHON": python})
                    self.assertEqual((result.returncode, len(result.stderr.splitlines())), (code, 1))
                    self.assertIn(part, result.stderr)
        self.assertEqual((self.folder / "report.html").read_bytes(), page)

    @unittest.skipUnless(has_plotly, "plotly is not installed")
    def test_a_page_that_is_stopped_again_and_again(self):
        log = self.write_log("run.jsonl", "fp32")
        self.report(log)
        run = self.spawn(self.program, "report", log, "-o", "again.html", env={"PYTHONUNBUFFERED": "1"},
                         start_new_session=True)
        end = time.monotonic() + 120
        while run.poll() is None and time.monotonic() < end:
            for number, pause in ((signal.SIGSTOP, 0.004), (signal.SIGCONT, 0.002)):
                os.killpg(run.pid, number)
                time.sleep(pause)
        self.assertEqual(run.wait(timeout=60), 0)
        pages = [(self.folder / name).read_bytes() for name in ("report.html", "again.html")]
        self.assertEqual(*pages)

    def test_missing_packages_and_pythons(self):
        self.write_comparison()
        bare = self.script(f'exec "{sys.executable}" -s -S "$@"')
        events = ("export", "--tensorboard", "events", "out.0.jsonl")
        for words, python, part in ((("report", "out.json"), bare, "python3-plotly"),
                                    (events, bare, "needs tensorboard"),
                                    (("report", "out.json"), "/nowhere/python", "/nowhere/python")):
            result = self.run_command(*words, env={"GRADWIRE_PYTHON": str(python)})
            self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 1), result.stderr)
            self.assertIn(part, result.stderr)
        self.assertFalse((self.folder / "report.html").exists())

    def test_csv_has_a_row_for_each_step_of_each_log(self):
        logs = [self.write_log("a,b.jsonl", "fp32", steps=3), self.write_log("c.jsonl", "int8", steps=2)]
        self.succeed("export", "--csv", "steps.csv", "a,b.jsonl", "c.jsonl")
        with open(self.folder / "steps.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        steps = [(log.name, r) for log in logs for r in self.records(log.name) if r["type"] == "step"]
        self.assertEqual(len(rows), 5)
        for row, (log, step) in zip(rows, steps):
            self.assertEqual(row.pop("log"), log)
            self.assertEqual({name: float(value) for name, value in row.items()},
                             {name: value for name, value in step.items() if name != "type"})
        shown = self.succeed("export", "--csv", "-", "a,b.jsonl", "c.jsonl").stdout
        self.assertEqual(shown, (self.folder / "steps.csv").read_text())
        both = self.run_command("export", "--csv", "x", "--tensorboard", "y", "c.jsonl")
        self.assert_refused(both, "--csv", "--tensorboard")


@unittest.skipUnless(importlib.util.find_spec("tensorboard"), "tensorboard is not installed")
class Export(ReportTest):
    def test_event_files_have_the_records(self):
        self.write_log("run.jsonl", "fp32", seed=1)
        words = ("export", "--tensorboard", "events", "run.jsonl")
        self.assertEqual(self.run_command(*words).stdout, "TensorBoard: events/run\n")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(str(self.folder / "events/run"), size_guidance={"scalars": 0})
        events.Reload()
        steps = [r for r in self.records() if r["type"] == "step"]
        for (tag, name) in (("train/loss", "loss"), ("sent/wire_bytes", "wire_bytes")):
            found = events.Scalars(tag)
            self.assertEqual([e.step for e in found], list(range(1, 51)))
            for event, record in zip(found, steps):
                self.assertAlmostEqual(event.value, record[name], places=5)
        self.assertAlmostEqual(events.Scalars("test/accuracy")[0].value, 0.82, places=5)
        self.assert_refused(self.run_command(*words), "contains event files already")


@unittest.skipUnless(has_browser, "chromium, chromium-driver, python3-selenium or plotly is not installed")
class Browser(ReportTest):
    @classmethod
    def setUpClass(cls):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
        options = webdriver.ChromeOptions()
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.binary_location = shutil.which("chromium")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
        cls.addClassCleanup(cls.driver.quit)

    def setUp(self):
        super().setUp()
        self.write_comparison()
        self.report("out.json")

    def run_script(self, script):
        return self.driver.execute_script("return " + script)

    def open(self, width=900, theme="light"):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": theme}]})
        self.driver.get(f"file://{self.folder}/report.html")
        end = time.monotonic() + 60
        while not self.run_script("document.documentElement.dataset.ready"):
            self.assertLess(time.monotonic(), end, "the page was not drawn within 60 s")
            time.sleep(0.05)

    def find(self, selector):
        return self.driver.find_elements("css selector", selector)

    def names(self):
        return [cell.text for cell in self.find("#results td:first-child")]

    def test_renders_at_three_widths_in_light_and_dark(self):
        for width in (400, 900, 1600):
            for theme, red in THEMES.items():
                with self.subTest(width=width, theme=theme):
                    self.open(width, theme)
                    self.assertEqual(self.driver.get_log("browser"), [])
                    self.assertLessEqual(self.run_script("document.documentElement.scrollWidth"), width)
                    for chart in ("by-bytes", "by-time", "curve-chart", "part-chart", "wait-matrix"):
                        size = self.run_script(f"document.querySelector('#{chart} .main-svg').clientWidth")
                        self.assertGreater(size, 300)
                    self.assertIn("Rank 1 is the straggler", self.find("#straggler")[0].text)
                    background = self.run_script("getComputedStyle(document.body).backgroundColor")
                    self.assertIn(f"rgb({red},", background)
                    self.assertGreater(len(self.driver.get_screenshot_as_png()), 10000)
        self.assertEqual(self.run_script("performance.getEntriesByType('resource').length"), 0)

    def test_the_headline_is_the_time_to_the_target_over_the_links(self):
        self.open()
        self.assertIn("3 ranks on host over emulated links of 150 Mbit/s", self.find("#about")[0].text)
        self.assertEqual(self.find("#cards div")[0].text.splitlines(),
                         ["First to 84 % accuracy", "powersgd:rank=4", "after 3.0 s, 13.3x as fast as fp32"])
        labels = self.run_script("document.getElementById('by-bytes').data.at(-1).text")
        self.assertEqual([label.strip("\u00a0") for label in (labels[0], labels[-1])],
                         ["powersgd:rank=4", "fp32"])

    def test_the_filter_selects_specs_everywhere(self):
        self.open()
        traces = "document.getElementById('by-bytes').data"
        shown = traces + ".filter((t) => t.mode === 'markers').map((t) => t.name)"
        self.assertEqual(self.names(), ["fp32", "int8", "powersgd:rank=4"])
        self.driver.find_element("css selector", "body").send_keys("/")
        box = self.driver.switch_to.active_element
        box.send_keys("POWER rank")
        self.assertEqual(self.names(), ["powersgd:rank=4"])
        self.assertEqual(self.run_script(shown), ["powersgd:rank=4"])
        self.assertEqual(self.find("#count")[0].text, "1 of 3")
        self.assertEqual(self.run_script("document.getElementById('run').options.length"), 2)
        box.send_keys("\ue00c")  # Escape
        box.send_keys("-power")
        self.assertEqual(self.run_script(shown), ["fp32", "int8"])
        box.send_keys(" zz")
        self.assertEqual((self.names(), self.run_script(traces)), ([], None))
        self.assertIn("No spec in this selection", self.find("#by-bytes")[0].text)
        box.send_keys("\ue00c")
        self.assertEqual(self.run_script(shown), ["fp32", "int8", "powersgd:rank=4"])
        self.assertNotIn("No spec", self.find("main")[0].text)
        for chart in ("by-bytes", "part-chart"):
            heights = self.run_script(f"[...document.querySelectorAll('#{chart}, #{chart} .main-svg')]"
                                      ".map((e) => e.clientHeight)")
            self.assertEqual(len(set(heights)), 1, heights)
        self.find("#legend button")[0].click()
        self.assertEqual(self.names(), ["int8", "powersgd:rank=4"])
        self.assertEqual(self.driver.get_log("browser"), [])

    def test_hovering_names_the_spec(self):
        from selenium.webdriver.common.action_chains import ActionChains
        self.open()
        for chart in ("by-bytes", "by-time", "part-chart"):
            self.run_script(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
            points = self.find(f"#{chart} .scatterlayer .point, #{chart} .barlayer .point")
            ActionChains(self.driver).move_to_element(points[1]).perform()
            end = time.monotonic() + 20
            while not self.find(f"#{chart} .hoverlayer .hovertext"):
                self.assertLess(time.monotonic(), end, f"{chart} shows nothing")
            self.assertIn("int8", self.find(f"#{chart} .hoverlayer .hovertext")[0].text)

    def test_tables_sort_by_click_and_by_key(self):
        self.open()
        button = next(b for b in self.find("#results th button") if b.text == "Sent per step")
        button.click()
        self.assertEqual(self.names(), ["powersgd:rank=4", "int8", "fp32"])
        self.driver.switch_to.active_element.send_keys("\ue007")  # Enter
        self.assertEqual(self.names(), ["fp32", "int8", "powersgd:rank=4"])
        self.assertEqual(self.find("#results th[aria-sort=descending]")[0].text, "Sent per step")
        self.find("#rows-by")[0].send_keys("seed")
        self.assertEqual(len(self.names()), 6)

    def test_names_in_files_are_shown_as_text(self):
        name = "<img src=x onerror=alert(1)>"
        log = self.write_log("other.jsonl", name, data="</script><script>alert(2)</script>")
        self.report(log)
        self.open()
        self.assertEqual((self.names(), self.find("img"), self.driver.get_log("browser")), ([name], [], []))

    def test_the_slider_smooths_the_loss(self):
        self.open()
        last = "document.getElementById('curve-chart').data.filter((t) => t.name)[0].y.slice(-2)"
        rough, slider = self.records("out.0.jsonl")[49:51], self.find("#smoothing")[0]
        smooth = self.run_script(last)
        slider.send_keys("\ue011")  # Home: no smoothing
        raw = self.run_script(last)
        for value, record in zip(raw, rough):
            self.assertAlmostEqual(value, record["loss"], places=3)
        self.assertLess(abs(smooth[0] - smooth[1]), 0.3 * abs(raw[0] - raw[1]))


if __name__ == "__main__":
    main()
