"""A real browser for pages: Chromium, headless, driven by Selenium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DESK, PHONE = (1280, 900), (390, 800)

LOW_CONTRAST = """
const luminance = ([r, g, b]) => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = [r, g, b].map((v) => linear(v / 255));
  return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
};
const parts = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
const ground = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const found = parts(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found.slice(0, 3);
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const low = [];
let count = 0;
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (!text || !node.checkVisibility()) continue;
  if (node.closest("script,style,option,:disabled,svg")) continue;
  const style = getComputedStyle(node);
  const [a, b] = [luminance(parts(style.color)), luminance(ground(node))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  count += 1;
  if (ratio < (large ? 3 : 4.5)) low.push(`${node.tagName} ${text.slice(0, 40)} ${ratio}`);
}
return [count, low];
"""
"""Count the texts on a page, and list those below WCAG 2.1's contrast of level AA (1.4.3)."""


@contextmanager
def browser(
    size: tuple[int, int] = DESK, *, dark: bool = False, downloads: Path | None = None
) -> Iterator[Any]:
    """Return a browser's window of so many pixels; skip the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    if downloads is not None:
        options.add_experimental_option(
            "prefs", {"download.default_directory": str(downloads), "safebrowsing.enabled": False}
        )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        window(driver, size)
        prefer(driver, dark=dark)
        yield driver
    finally:
        driver.quit()


def window(driver: Any, size: tuple[int, int]) -> None:
    """Make the page so many CSS pixels wide and high."""
    wide, high = size
    settings = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": wide < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", settings)


def prefer(driver: Any, *, dark: bool) -> None:
    """Let the system be dark, or light."""
    value = "dark" if dark else "light"
    features = [{"name": "prefers-color-scheme", "value": value}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(driver: Any) -> list[str]:
    """Return what the console says of errors since it was last asked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def low_contrast(driver: Any) -> list[str]:
    """List the texts whose contrast is below level AA; an empty page is a failure."""
    count, low = driver.execute_script(LOW_CONTRAST)
    assert count > 10
    return list(low)


def is_wider_than_window(driver: Any) -> bool:
    """Say whether one has to scroll sideways to see all of the page."""
    script = "return document.documentElement.scrollWidth > window.innerWidth"
    return bool(driver.execute_script(script))
