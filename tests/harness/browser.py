"""A real browser for tests, benchmarks and the pictures of the documentation: Chromium, driven by selenium."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def is_there() -> bool:
    """Whether this machine has Chromium, its driver and selenium."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return False
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One window. Waits for what it is asked for; a test never sleeps."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, where: str = "") -> None:
        self.driver.get("about:blank")  # a new hash alone would not load the page again
        self.driver.get(f"{path.resolve().as_uri()}{'#' + where if where else ''}")
        self.painted()

    def painted(self) -> None:
        """Wait until the browser has drawn what is there now."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"
        self.driver.execute_async_script(script)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText ?? e.textContent)"
        found: list[str] = self.run(script, selector)
        return found

    def text(self, selector: str) -> str:
        found = self.texts(selector)
        assert len(found) == 1, f"{selector} is there {len(found)} times"
        return found[0]

    def click(self, selector: str, text: str = "") -> None:
        """A real click on the one visible element that has this text."""
        elements = [e for e in self.driver.find_elements("css selector", selector) if e.is_displayed()]
        found = [element for element in elements if not text or element.text == text]
        assert found, f"nothing to click: {selector} {text!r}, there are {[element.text for element in elements]}"
        self.run("arguments[0].scrollIntoView({block: 'center'})", found[0])
        found[0].click()
        self.painted()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
        self.painted()

    def click_drawn(self, name: str) -> None:
        """A real click on the canvas, where a node is drawn."""
        from selenium.webdriver.common.action_chains import ActionChains

        script = """
            const canvas = document.querySelector(".canvas"), cy = canvas._cyreg.cy;
            const place = cy.getElementById("n:" + arguments[0]).renderedPosition();
            return [place.x - canvas.clientWidth / 2, place.y - canvas.clientHeight / 2]"""
        x, y = self.run(script, name)
        canvas = self.driver.find_element("css selector", ".canvas")
        ActionChains(self.driver).move_to_element_with_offset(canvas, round(x), round(y)).click().perform()
        self.painted()

    def drawn_colour(self, name: str) -> str:
        script = """
            const cy = document.querySelector(".canvas")._cyreg.cy;
            return cy.getElementById("n:" + arguments[0]).style("background-color")"""
        colour: str = self.run(script, name)
        return colour

    def complaints(self) -> list[str]:
        """What the console has said since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """Every address the browser has asked for since the last time, without what is in the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return {url.partition("#")[0] for url in urls if not url.startswith(("data:", "about:", "blob:"))}

    def picture(self, path: Path) -> None:
        self.painted()
        path.write_bytes(base64.b64decode(self.driver.get_screenshot_as_base64()))


@contextmanager
def browser() -> Iterator[Browser]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.get("about:blank")  # newer versions go on loading their own first page
            yield Browser(driver)
        finally:
            driver.quit()
