#!/usr/bin/env python3
"""Tests the built documentation in headless Chromium: pages fit three widths, the search finds, versions show.

    site_test.py SITE VERSION

Prints a line and succeeds where Chromium, its driver or Selenium is missing.
"""
import functools
import http.server
import importlib.util
import pathlib
import shutil
import sys
import threading
import time

WIDTHS = (1400, 800, 420)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    return webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)


def wait_for(condition, seconds=60):
    """Returns the condition's first true value, or its last value after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


def fits(driver, width):
    """Returns whether the page's content fits the window, once the theme's animations have ended."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    return wait_for(lambda: driver.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"), seconds=10)


def finds(driver, text, title):
    """Returns whether the search for a text lists a page of this title."""
    field = driver.find_element("css selector", ".md-search__input")
    driver.execute_script("arguments[0].focus()", field)
    field.send_keys(text)
    return wait_for(lambda: title in driver.execute_script(
        "return [...document.querySelectorAll('.md-search-result__article h1')].map(e => e.textContent)"))


def check(driver, site, address):
    wrong = []
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    for page in pages:
        driver.get(f"{address}/{page}")
        wrong += [f"{page} is wider than a window of {width} pixels" for width in WIDTHS
                  if not fits(driver, width)]
    driver.get(f"{address}/index.html")
    fits(driver, WIDTHS[0])
    for text, title in (("gw_reducer_create", "C reference"), ("allreduce_hook", "Python reference")):
        if not finds(driver, text, title):
            wrong.append(f"a search for {text} does not find the page '{title}'")
        driver.refresh()
    shown = wait_for(lambda: driver.execute_script(
        "return [...document.querySelectorAll('.md-version__link')].map(e => e.textContent.trim())"))
    if site.name not in shown:
        wrong.append(f"the menu of versions shows {shown}, expected {site.name}")
    driver.get(address.rpartition("/")[0])
    if not wait_for(lambda: f"/{site.name}/index.html" in driver.current_url):
        wrong.append(f"the first page does not lead to {site.name}: {driver.current_url}")
    print("\n".join(wrong) or f"site: {len(pages)} pages fit windows of {', '.join(map(str, WIDTHS))} pixels")
    return 1 if wrong else 0


def main():
    site = pathlib.Path(sys.argv[1]).resolve()
    programs = shutil.which("chromium") and shutil.which("chromedriver")
    if not programs or importlib.util.find_spec("selenium") is None:
        print("site: not tested in a browser: chromium, chromium-driver or python3-selenium is not installed")
        return 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    driver = browser()
    try:
        return check(driver, site / sys.argv[2], f"http://127.0.0.1:{server.server_port}/{sys.argv[2]}")
    finally:
        driver.quit()


if __name__ == "__main__":
    sys.exit(main())
