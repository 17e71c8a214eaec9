"""The page that shows runs during training, in a real browser and from outside."""

import datetime
import http.client
import json
import shutil
import threading
from unittest import mock

import pytest

import launch
from fedjax_ssl import UserError
from fedjax_ssl.records.workdir import METRICS, SUMMARY, TIMINGS
from fedjax_ssl.report import watch


@pytest.fixture
def running(finished_fedanchor_run, tmp_path):
    """A folder of a run after its first round, and the lines of all its rounds."""
    run = tmp_path / "runs" / "mine"
    shutil.copytree(finished_fedanchor_run[0], run, ignore=shutil.ignore_patterns("checkpoints", SUMMARY))
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text(lines[0])
    return run, lines


@pytest.fixture
def server(running):
    with watch.serving([str(running[0].parent)], "localhost", 0) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("localhost", server.server_port)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_grows_with_the_run(browser, server, running, width):
    run, lines = running
    tab = browser.new_page(viewport={"width": width, "height": 800})
    complaints = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(f"http://localhost:{server.server_port}/")
    rounds = len(lines)
    tab.get_by_text(f"1/{rounds}", exact=True).wait_for()
    assert tab.locator("figure svg").count() == 3  # accuracy, pseudo-labels, qualified examples
    (run / METRICS).write_text("".join(lines[:2]))
    tab.get_by_text(f"2/{rounds}", exact=True).wait_for()
    accuracy = 100 * json.loads(lines[1])["test_accuracy"]
    assert f"{accuracy:.2f} % (test)" in tab.locator("table").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert complaints == []
    server.shutdown()
    server.server_close()
    tab.get_by_text("The server has ended").wait_for()
    assert tab.locator("figure svg").count() == 3  # the last content stays
    tab.close()


def test_a_finished_run_and_one_without_a_round(running, finished_fedanchor_run):
    run, lines = running
    shutil.copytree(finished_fedanchor_run[0], run.parent / "whole", ignore=shutil.ignore_patterns("checkpoints"))
    (run / METRICS).write_text("")
    text = watch.content([run.parent, run.parent / "later"])
    assert f"<td>{len(lines)}/{len(lines)}</td><td>finished</td>" in text
    assert "has not finished a round yet" in text and "holds no run" in text


def test_a_silent_run_is_told(running, monkeypatch):
    run, _ = running
    written = (run / METRICS).stat().st_mtime
    monkeypatch.setattr(watch.time, "time", lambda: written + 3600)
    assert "(no new round for 1:00:00)" in watch.content([run])


def test_the_time_left_is_that_of_all_seeds_in_the_program(running):
    run, lines = running
    (run / TIMINGS).write_text('{"round": 1, "seconds": 20.0, "seeds": 3}\n')
    assert f"<td>{datetime.timedelta(minutes=len(lines) - 1)}" in watch.content([run])


def test_it_answers_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/")[0] == get(server, "/content")[0] == 200
    assert get(server, "/", Host="[::1]")[0] == get(server, "/", Host="[::1]:80")[0] == 200
    assert get(server, "/", Host="elsewhere.example")[0] == 403  # a foreign name that resolves to this machine
    assert get(server, "/../config.json")[0] == get(server, "/content?x")[0] == 404


def test_a_folder_that_is_deleted_while_it_is_read(server, running, monkeypatch):
    with monkeypatch.context() as patched:
        gone = mock.Mock(side_effect=FileNotFoundError(2, "No such file or directory", "runs/mine/config.json"))
        patched.setattr(watch, "read_groups", gone)
        assert "runs/mine/config.json cannot be read: No such file" in get(server, "/content")[1]
    assert "<td>mine</td>" in get(server, "/content")[1]  # the next request shows the present state


def test_names_of_folders_are_no_html(running):
    run, _ = running
    text = watch.content([run.rename(run.with_name("<b>mine"))])
    assert "&lt;b&gt;mine" in text and "<b>" not in text


def test_bad_input_is_one_line(running, server, tmp_path, capfd):
    run, _ = running
    assert launch.main(["watch", str(tmp_path / "nowhere")]) == 2
    assert capfd.readouterr().err.splitlines()[-1] .startswith(f"error: {tmp_path / 'nowhere'} holds no run")
    for port in (server.server_port, 70_000):
        with pytest.raises(UserError, match=rf"^cannot listen on localhost:{port} \(.*\); --port=0 takes a free port$"):
            watch.serving([str(run)], "localhost", port)
