"""The chat page in a real browser: send a message, read the streamed answer, stop one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.end_to_end.server import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="Chromium or its driver is not installed",
    ),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--window-size=900,900",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def test_a_message_is_answered_token_by_token(server: Server, browser: webdriver.Chrome) -> None:
    browser.get(server.url)
    wait = WebDriverWait(browser, 30)
    wait.until(lambda page: "smollm2" in page.find_element(By.ID, "facts").text.lower())
    browser.execute_script("temperature.value = 0; document.getElementById('repetition-penalty').value = 1;")
    message = browser.find_element(By.ID, "message")
    message.send_keys("What is the capital of France?", Keys.ENTER)

    seen: set[str] = set()

    def is_answered(page: webdriver.Chrome) -> bool:
        turn = page.find_element(By.CSS_SELECTOR, ".turn.assistant")
        seen.add(turn.text)
        return "busy" not in (turn.get_attribute("class") or "").split()

    WebDriverWait(browser, 30, poll_frequency=0.02).until(is_answered)
    assert "Paris" in browser.find_element(By.CSS_SELECTOR, ".turn.assistant").text
    assert len(seen) > 2, "the answer came in one piece"
    wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "dl [data-part='cached'] dd").text not in {"–", "0"})
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_the_stop_button_ends_an_answer_and_frees_its_blocks(server: Server, browser: webdriver.Chrome) -> None:
    browser.get(server.url)
    wait = WebDriverWait(browser, 30)
    wait.until(lambda page: page.find_element(By.ID, "send").is_enabled())
    browser.execute_script("document.getElementById('max-tokens').value = 3000;")
    browser.find_element(By.ID, "message").send_keys("Count from one to one thousand in words.", Keys.ENTER)
    wait.until(lambda page: len(page.find_element(By.CSS_SELECTOR, ".turn.assistant").text) > 10)
    browser.find_element(By.ID, "stop").click()
    wait.until(lambda page: "stopped" in page.find_element(By.CSS_SELECTOR, ".turn.assistant .note").text)
    server.wait_until_idle()
