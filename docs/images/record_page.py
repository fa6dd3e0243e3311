"""Record the pictures of the server's page: server-page-light.png, server-page-dark.png and one-prefix.gif.

They show a real run of a server that somebody started. It should be new and have nothing else to do:

    octavo serve smollm2 --port 8010
    python docs/images/record_page.py http://127.0.0.1:8010

It needs playwright, Pillow and Chromium. The animation's frames are as long as they took.
"""

import io
import shutil
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1440, 1000
FRAME_S, LAST_FRAME_S, MAX_PAUSE_S = 0.2, 6.0, 0.6
# For rows of the tree that the last frame has not.
ROOM = 52
QUESTION = "Name three planets, and say one thing about each. Use a list."


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = opened(browser, url, "light")
        record(page, FOLDER / "one-prefix.gif")
        picture(page, FOLDER / "server-page-light.png")
        page = opened(browser, url, "dark")
        compare(page)
        picture(page, FOLDER / "server-page-dark.png")
        browser.close()


def opened(browser: Browser, url: str, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.wait_for_selector(".state.ready")
    return page


def compare(page: Page, each_frame: Callable[[], None] = lambda: None) -> None:
    """Let the page compare, and look at it all the while."""
    page.get_by_role("button", name="One prefix, many questions").click()
    while page.is_disabled("#race"):
        begun = time.monotonic()
        each_frame()
        page.wait_for_timeout(max(1.0, 1e3 * (begun + FRAME_S - time.monotonic())))


def record(page: Page, path: Path) -> None:
    frames: list[Image.Image] = []
    times: list[float] = []

    def take() -> None:
        times.append(time.monotonic())
        frames.append(Image.open(io.BytesIO(page.screenshot(clip=area(page)))).convert("RGB"))

    compare(page, take)
    # The tree as it is afterwards.
    page.wait_for_timeout(800)
    take()
    whole = [as_high(frame, frames[-1].height + ROOM) for frame in frames]
    pauses = [min(after - before, MAX_PAUSE_S) for before, after in pairwise(times)]
    save(whole, [*pauses, LAST_FRAME_S], path)


def as_high(frame: Image.Image, height: int) -> Image.Image:
    whole = Image.new("RGB", (frame.width, height), frame.getpixel((0, 0)))  # type: ignore[arg-type]
    whole.paste(frame)
    return whole


def area(page: Page) -> FloatRect:
    """Where the comparison and the tree below it are."""
    top, bottom = (
        page.locator(".card:has(#race)").bounding_box(),
        page.locator(".card:has(#tree)").bounding_box(),
    )
    assert top is not None
    assert bottom is not None
    height = bottom["y"] + bottom["height"] - top["y"] + 16
    return {"x": top["x"] - 8, "y": top["y"] - 8, "width": top["width"] + 16, "height": height}


def save(frames: list[Image.Image], pauses: list[float], path: Path) -> None:
    """Write frames with one palette, made of some of them; what did not change is left out."""
    some = [*frames[:: max(1, len(frames) // 12)], frames[-1]]
    mosaic = Image.new("RGB", (some[0].width, sum(frame.height for frame in some)))
    for place, frame in enumerate(some):
        mosaic.paste(frame, (0, place * frame.height))
    palette = mosaic.quantize(128, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1e3 * pause) for pause in pauses]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size:,} bytes, {sum(pauses):.1f} s")


def picture(page: Page, path: Path) -> None:
    """Three answers that are being written, and what the engine does meanwhile."""
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#n", "3")
    page.evaluate("document.getElementById('settings').open = false")
    page.fill("#prompt", QUESTION)
    page.keyboard.press("Enter")
    while page.is_disabled("#send") and (
        len(page.locator(".messages").inner_text()) < 480 or page.text_content("#running") == "0, 0"
    ):
        page.wait_for_timeout(50)
    page.screenshot(path=path)
    image = Image.open(path).convert("RGB")
    image.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
    page.keyboard.press("Escape")


if __name__ == "__main__":
    main(*sys.argv[1:])
