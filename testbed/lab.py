"""A real JupyterLab in a real browser: what its pages are tested and measured with."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Locator, Page, expect, sync_playwright

from testbed.jupyter import Server
from testbed.kernel import LIMIT, wait_until

ROOT = Path(__file__).resolve().parents[1]
PREBUILT = ROOT / "labextension" / "prebuilt"  # found before what an older installation has left
SHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PLAIN_HOST = "plain.test"  # a name of this machine that browsers do not know as its own
QUIET = '{"fetchNews": "false", "checkForUpdates": false}'  # JupyterLab asks the network for nothing
NOTEBOOKS_OWN = ("Cannot read properties of undefined (reading 'schema')",)  # of 7.6, also without any extension
CURRENT = "jupyterapp.shell.currentWidget"
LOOP = """\
%%distributed
import time
print("rank", rank, "loops", flush=True)
while True: time.sleep(0.05)"""


class Lab(Server):
    """JupyterLab as a user starts it, or Jupyter Notebook.

    Args:
        folder: Its notebooks, settings and log.
        extended: Whether the server has loaded nbdist.
        module: What runs: `jupyterlab` or `notebook`.
    """

    def __init__(self, folder: Path, *, extended: bool = True, module: str = "jupyterlab") -> None:
        settings = folder / "settings"
        news = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text(QUIET)
        own = {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}
        own["PYTHONPATH"] = str(ROOT)  # kernels run in another folder, with the nbdist that is tested
        app, self.path = ("LabApp", "doc/tree") if module == "jupyterlab" else ("JupyterNotebookApp", "notebooks")
        options = (
            f"--{app}.expose_app_in_browser=True",
            f"--{app}.extra_labextensions_path={PREBUILT}",
            f"--ServerApp.local_hostnames=['localhost', '{PLAIN_HOST}']",
            f"--ServerApp.jpserver_extensions={{'nbdist.server': {extended}}}",
        )
        self.own_errors = () if module == "jupyterlab" else NOTEBOOKS_OWN
        super().__init__(folder, module, *options, environment=own)


def _as_it_is(notebook: nbformat.NotebookNode) -> None:
    pass


def _is_of_splash(error: Error) -> bool:
    """Return whether it is JupyterLab's own: when it starts slowly, it removes its splash screen twice."""
    places = [line for line in (error.stack or "").splitlines() if line.lstrip().startswith("at ")]
    return "'removeChild' on 'Node'" in str(error) and len(places) == 1 and "/static/lab/jlab_core" in places[0]


class Notebook:
    """A notebook that is open in a page of its own."""

    def __init__(
        self,
        lab: Lab,
        browser: Browser | BrowserContext,
        cells: list[str],
        prepare: Callable[[nbformat.NotebookNode], None] = _as_it_is,
    ) -> None:
        self._lab = lab
        self.name = f"{secrets.token_hex(4)}.ipynb"
        new = nbformat.v4
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # else the page asks for one
        notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells], metadata=kernel)
        prepare(notebook)
        nbformat.write(notebook, lab.folder / self.name)
        # Pages of one context share what they have fetched, which is most of JupyterLab; `new_page` would make another.
        self.page: Page = (browser.contexts[0] if isinstance(browser, Browser) else browser).new_page()
        self.page.set_viewport_size({"width": 1100, "height": 900})
        self.page.set_default_timeout(1000 * LIMIT)
        self._errors: list[str] = []
        self._was_restarted = False
        self._was_without_server = False
        self.page.on("pageerror", self._note_error)
        self.page.on("console", self._note)
        self.open()

    def _note_error(self, error: Error) -> None:
        # JupyterLab's own, of a thread that a page has asked of a kernel that ends.
        is_of_thread = self._was_restarted and "Canceled future for create_subshell_request" in str(error)
        if str(error) not in self._lab.own_errors and not _is_of_splash(error) and not is_of_thread:
            self._errors.append(error.stack or str(error))

    def _note(self, message: ConsoleMessage) -> None:
        """Keep what goes wrong, except what does without us, too: services and widgets that nobody has.

        And JupyterLab's debugger, which asks a kernel that ends meanwhile.
        """
        known = ["Failed to load resource", "widget model not found", "Could not restore the debugger state"]
        if self._was_restarted:  # what the old kernel has still said
            known.append("Comm not found for comm id")
        if self._was_without_server:  # JupyterLab's own attempts to reach what is not there
            known += ["WebSocket connection to", "Kernel does not exist", "Invalid response: 404"]
        if message.type == "error" and not any(words in message.text for words in known):
            self._errors.append(message.text)

    def open(self) -> None:
        """Open it, and wait for its kernel."""
        self.page.goto(f"{self._lab.url}/{self._lab.path}/{self.name}?token={self._lab.token}")
        self._wait_for_kernel()

    def reload(self) -> None:
        self.page.reload()
        self._wait_for_kernel()

    def _wait_for_kernel(self) -> None:
        session = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session"
        self.page.wait_for_function(f"{session}?.kernel?.connectionStatus === 'connected'")

    def command(self, name: str, arguments: dict[str, Any]) -> None:
        self.page.evaluate("([name, arguments]) => jupyterapp.commands.execute(name, arguments)", [name, arguments])

    def start(self, index: int) -> None:
        """Run a cell and don't wait for it."""
        self.choose(index)
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-cell') }")

    def choose(self, index: int) -> None:
        self.page.evaluate(f"index => {{ {CURRENT}.content.activeCellIndex = index }}", index)

    def run(self, index: int) -> None:
        """Run a cell to its end."""
        self.choose(index)
        ran = "jupyterapp.commands.execute('notebook:run-cell')"  # evaluate() itself has no limit
        late = f"new Promise((_, fail) => setTimeout(() => fail(new Error('not run in {LIMIT:g} s')), {1000 * LIMIT}))"
        self.page.evaluate(f"Promise.race([{ran}, {late}])")
        outputs = self.page.evaluate(f"index => {CURRENT}.content.widgets[index].model.outputs.toJSON()", index)
        assert not [output["evalue"] for output in outputs if output["output_type"] == "error"]

    def result(self, index: int) -> str:
        """Run a cell to its end, and return its value as the page shows it."""
        self.run(index)
        outputs = self.page.evaluate(f"index => {CURRENT}.content.widgets[index].model.outputs.toJSON()", index)
        values = [output["data"] for output in outputs if "data" in output]  # the kernel may have logged something, too
        assert values, outputs
        return str(values[-1]["text/plain"])

    def clear(self, index: int) -> None:
        """Take a cell's output away."""
        self.choose(index)
        self.page.evaluate("jupyterapp.commands.execute('notebook:clear-cell-output')")

    def is_running(self, index: int) -> bool:
        state = self.page.evaluate(f"index => {CURRENT}.content.widgets[index].model.executionState", index)
        return bool(state == "running")

    def server_status(self) -> str:
        """How the Jupyter server has the kernel: what it goes by when it ends idle ones."""
        kernels, own = "jupyterapp.serviceManager.kernels", f"{CURRENT}.sessionContext.session.kernel.id"
        found = f"[...{kernels}.running()].find(kernel => kernel.id === {own}).execution_state"
        return str(self.page.evaluate(f"async () => {{ await {kernels}.refreshRunning(); return {found} }}"))

    def listen(self) -> None:
        """Note what the kernel tells the page of how it looks at ranks."""
        note = "const head = message.content?.data?.content?.head; if (head?.live) told.push([head.live, head.rate])"
        kernel = f"{CURRENT}.sessionContext.session.kernel"
        self.page.evaluate(f"() => {{ told = []; {kernel}.iopubMessage.connect((_, message) => {{ {note} }}) }}")

    @property
    def told(self) -> list[list[object]]:
        """What it has noted: "live" or "paused", and the rate."""
        found: list[list[object]] = self.page.evaluate("told")
        return found

    def interrupt(self) -> None:
        self.page.evaluate(f"{CURRENT}.sessionContext.session.kernel.interrupt()")

    def source(self, index: int) -> str:
        return str(
            self.page.evaluate(f"index => {CURRENT}.content.widgets[index].model.sharedModel.getSource()", index)
        )

    def save(self) -> None:
        self.page.evaluate(f"{CURRENT}.context.save()")

    def restart_kernel(self) -> None:
        self._was_restarted = True
        self.page.evaluate(f"{CURRENT}.sessionContext.session.kernel.restart()")
        self._wait_for_kernel()

    def restart_server(self, signum: int) -> None:
        """End the server with a signal, and start it again at the same address once the page has noticed."""
        self._was_without_server = True
        self._lab.close(signum)
        self._wait_for_connection("!== 'connected'")
        self._lab.start()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Have JupyterLab give up when its connection is closed in the body, as after seven attempts, in minutes."""
        self._was_without_server = True
        attempts = f"{CURRENT}.sessionContext.session.kernel._reconnectLimit"
        before = self.page.evaluate(attempts)
        self.page.evaluate(f"{attempts} = 0")
        yield
        self._wait_for_connection("=== 'disconnected'")
        self.page.evaluate(f"{attempts} = {before}")

    def _wait_for_connection(self, wanted: str) -> None:
        self.page.wait_for_function(f"window.{CURRENT}.sessionContext.session?.kernel?.connectionStatus {wanted}")

    def end_kernel(self) -> None:
        self.page.evaluate(f"{CURRENT}.sessionContext.shutdown()")

    @property
    def panel(self) -> Locator:
        """The living panel."""
        return self.page.locator(".nbdist-panel")

    @property
    def copy(self) -> Locator:
        """What stays when it is gone."""
        return self.page.locator(".nbdist-static")

    def wait_until(self, reached: Callable[[], object], what: str) -> None:
        wait_until(reached, what, LIMIT)

    def brightness(self, element: Locator) -> float:
        """Of its ground: 0 to 1."""
        return _luminance(element.evaluate("element => getComputedStyle(element).backgroundColor"))

    def contrast(self, element: Locator) -> float:
        """Of its text with the panel's ground, as WCAG counts."""
        text = _luminance(element.evaluate("element => getComputedStyle(element).color"))
        low, high = sorted((text, self.brightness(self.panel)))
        return (high + 0.05) / (low + 0.05)

    def shoot(self, name: str) -> None:
        """Keep a picture of what is seen, as an artifact."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        errors = list(self._errors)  # not what JupyterLab says of its own while the kernel goes
        self.end_kernel()
        self.page.close()
        assert not errors, errors


def start_loop(notebook: Notebook, index: int) -> None:
    """Run LOOP on two ranks, and wait until both are in it."""
    notebook.start(index)
    output = notebook.page.locator(".jp-Cell").nth(index).locator(".jp-Cell-outputWrapper")
    for rank in range(2):
        expect(output).to_contain_text(f"rank {rank} loops")


def show_sidebar(notebook: Notebook) -> Locator:
    """Open the extension's sidebar."""
    notebook.command("nbdist:show-ranks", {})
    sidebar = notebook.page.locator(".nbdist-sidebar")
    expect(sidebar).to_be_visible()
    return sidebar


def unfold(within: Locator, title: str) -> None:
    """Open a section of the sidebar. With the keyboard: a click misses it while what is above still takes its place."""
    within.locator("summary").filter(has_text=re.compile(f"^{title}$")).press("Enter")


def expect_place(cell: Locator, place: str) -> None:
    """A cell's badge says this, whether or not it is a picker at the moment."""
    shown = ("button.nbdist-badge-of-cell", "select.nbdist-badge-of-cell option:checked")
    expect(cell.locator(", ".join(shown))).to_have_text(place)


def move_cell(cell: Locator, place: str) -> None:
    """Choose where a cell runs with its badge, which is a picker once it has the focus."""
    badge = cell.locator(".nbdist-badge-of-cell")
    badge.focus()
    badge.select_option(place)


def search_output(cell: Locator, words: str) -> None:
    """Search a cell's output, by a field that is one once it has the focus."""
    search = cell.locator(".nbdist-tab-search")
    search.focus()
    search.fill(words)


@contextmanager
def browser_without_window(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    """Start the system's Chromium, with one context.

    Args:
        options: Of its command line.
        environment: All of it; None: that of this process.

    Raises:
        FileNotFoundError: There is no Chromium here.
    """
    executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        raise FileNotFoundError("there is no Chromium here: sudo apt-get install chromium")
    own: dict[str, str | float | bool] = {**(environment or os.environ), "TMPDIR": "/tmp"}  # a socket's path is short
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", *options], env=own)
        browser.new_context()
        yield browser
        browser.close()


def number(text: str) -> float:
    """The first number in a text."""
    found = re.search(r"[\d,.]+", text)
    assert found, text
    return float(found[0].replace(",", ""))


def _luminance(color: str) -> float:
    """Of a CSS color like "rgb(17, 17, 17)", as WCAG counts."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
