"""Children start as told, end as told, and leave nothing behind, whatever is killed."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from apache_beam_vllm_dynamo import _process
from apache_beam_vllm_dynamo._marker import MARKER, SWEEP_BOUND_S
from apache_beam_vllm_dynamo._process import ChildSpec, ExitStatus, ManagedProcess, stop_all
from apache_beam_vllm_dynamo.errors import MissingDependencyError, StartError
from tests.support.processes import (
    FAKES,
    PATIENCE_S,
    ROOT,
    ProcessTree,
    fds_of,
    not_to_be_collected,
    nothing_left_in_this_process,
    parent_of,
    report_of,
    runs,
    session_of,
    state_of,
    wait_until,
)

STUBBORN = {'IGNORE_SIGTERM': '1'}
GRANDCHILD = {'SPAWN_GRANDCHILD_IN_OWN_SESSION': '1'}


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    with ProcessTree() as tree:
        yield tree


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    with nothing_left_in_this_process():
        yield
        gc.collect()


def started(spec: ChildSpec, **kwargs: object) -> ManagedProcess:
    child = ManagedProcess(spec)
    child.start(**kwargs)  # type: ignore[arg-type]  # only ever hold_fds
    return child


def guard_of(child: ManagedProcess) -> int:
    """The process id of the shim."""
    assert child.pid is not None
    guard = parent_of(child.pid)
    assert guard is not None
    assert guard != os.getpid()
    return guard


class TestStart:
    def test_command_line_and_environment_arrive_exactly(self, tree: ProcessTree) -> None:
        """Blanks, empty and non-ASCII arguments; nothing of the owner's environment."""
        arguments = ('--flag', '', 'two words', 'ä\n"\'', '{"a": [1]}', '-')
        spec = tree.spec(*arguments, env={'HOME': '/nowhere', 'EMPTY': '', 'ÄÖ': '€='})
        child = started(spec)
        report = report_of(child)
        assert report['argv'] == [str(FAKES / 'child.py'), *arguments]
        env = report['env']
        assert len(env.pop(MARKER)) > 10
        assert env.pop('SPT_NOENV') == '1'
        assert env == spec.env
        child.stop('end of the test')

    def test_it_runs_in_the_given_directory_with_no_descriptor_but_the_standard_ones(
        self, tree: ProcessTree, tmp_path: pathlib.Path
    ) -> None:
        """An inheritable descriptor of the owner does not leak into the command either."""
        with (tmp_path / 'leak').open('w') as leak:
            os.set_inheritable(leak.fileno(), True)
            spec = tree.spec()
            child = started(ChildSpec(spec.label, spec.argv, spec.env, str(tmp_path)))
            report = report_of(child)
        assert report['other_fds'] == []
        assert report['fds']['0'] == '/dev/null'
        assert report['fds']['1'] == report['fds']['2']
        assert pathlib.Path(f'/proc/{child.pid}/cwd').readlink() == tmp_path
        assert set(fds_of(child.pid or 0)) == {0, 1, 2}
        child.stop('end of the test')

    def test_the_command_is_looked_up_on_the_path_of_its_environment(
        self, tree: ProcessTree, tmp_path: pathlib.Path
    ) -> None:
        """Not on the owner's."""
        tool = tmp_path / 'a-tool-of-its-own'
        tool.write_text('#!/bin/sh\necho "$0"\n')
        tool.chmod(0o755)
        child = started(ChildSpec('tool', (tool.name,), {**tree.env, 'PATH': str(tmp_path)}))
        assert child.wait(PATIENCE_S) == ExitStatus(0)
        assert child.log_tail() == (str(tool),)

    @pytest.mark.parametrize('kind', ['absent', 'not executable', 'no such directory'])
    def test_a_command_that_cannot_be_executed_is_named_and_its_environment_is_not(
        self, tree: ProcessTree, tmp_path: pathlib.Path, kind: str
    ) -> None:
        """The error says which command is missing, and pickles."""
        command = tmp_path / 'etcd'
        if kind == 'not executable':
            command.write_text('')
        if kind == 'no such directory':
            command = tmp_path / 'bin' / 'etcd'
        child = ManagedProcess(ChildSpec('etcd', (str(command),), {**tree.env, 'TOKEN': 's3cret'}))
        with pytest.raises(MissingDependencyError, match=r'etcd: cannot run .*/etcd') as error:
            child.start()
        assert 's3cret' not in str(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
        assert child.poll() is None
        assert child.pid is None
        assert child.stop('nothing to do')

    def test_the_guard_is_out_of_reach_of_the_terminal_and_the_group_of_its_owner(
        self, tree: ProcessTree
    ) -> None:
        """Guard and command each lead a session, so Ctrl-C reaches neither."""
        child = started(tree.spec())
        guard = guard_of(child)
        assert session_of(guard) == guard
        assert session_of(child.pid or 0) == child.pid
        child.stop('end of the test')

    def test_a_missing_directory_is_named(self, tree: ProcessTree) -> None:
        """The command is not to blame for that."""
        child = ManagedProcess(ChildSpec('x', ('true',), tree.env, '/no/such/directory'))
        with pytest.raises(StartError, match='/no/such/directory') as error:
            child.start()
        assert not isinstance(error.value, MissingDependencyError)

    def test_an_interpreter_that_cannot_run_is_reported_with_what_it_said(
        self, tree: ProcessTree, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        """The guard itself fails: the error carries its output, and nothing hangs."""
        broken = tmp_path / 'python'
        broken.write_text('#!/bin/sh\necho "libpython is missing" >&2\nexit 127\n')
        broken.chmod(0o755)
        monkeypatch.setattr(sys, 'executable', str(broken))
        with pytest.raises(StartError, match='libpython is missing'):
            ManagedProcess(ChildSpec('x', ('true',), tree.env)).start()

    def test_it_starts_once_and_not_after_a_stop(self, tree: ProcessTree) -> None:
        """A restart makes a new object."""
        child = started(tree.spec(env={'EXIT_CODE': '0'}))
        with pytest.raises(RuntimeError, match='before'):
            child.start()
        assert child.wait(PATIENCE_S) == ExitStatus(0)
        never = ManagedProcess(tree.spec())
        assert never.stop('no longer wanted')
        with pytest.raises(RuntimeError, match='before'):
            never.start()
        assert never.poll() is None

    def test_a_guard_that_does_not_answer_ends_the_start_in_time(
        self, tree: ProcessTree, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        """The bound of a start is real, and what hangs is killed."""
        hanging = tmp_path / 'python'
        hanging.write_text('#!/bin/sh\nexec sleep 100\n')
        hanging.chmod(0o755)
        monkeypatch.setattr(sys, 'executable', str(hanging))
        monkeypatch.setattr(_process, 'START_BOUND_S', 0.3)
        child = ManagedProcess(ChildSpec('x', ('true',), {**tree.env, 'PATH': os.environ['PATH']}))
        with pytest.raises(StartError, match='not running after'):
            child.start()
        tree.wait_until_gone()


class TestOutput:
    def test_both_streams_are_kept_logged_and_handed_on(
        self, tree: ProcessTree, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A callback that fails costs one traceback in the log, not the reader."""
        caplog.set_level(logging.DEBUG, logger=_process.__name__)
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            if len(lines) == 1:
                raise ValueError('a bug of the caller')

        argv = ('/bin/sh', '-c', 'echo one; echo two >&2; printf three')
        child = ManagedProcess(ChildSpec('sh', argv, tree.env), on_line)
        child.start()
        assert child.wait(PATIENCE_S) == ExitStatus(0)
        assert lines == ['one', 'two', 'three']
        assert child.log_tail() == ('one', 'two', 'three')
        assert child.log_tail(2) == ('two', 'three')
        assert child.log_tail(0) == ()
        assert 'sh | two' in caplog.messages
        assert 'a bug of the caller' in caplog.text

    def test_the_end_is_reported_after_all_of_the_output(self, tree: ProcessTree) -> None:
        """A tail taken when `poll` says it ended is complete, and bounded."""
        argv = ('/bin/sh', '-c', 'i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done')
        child = started(ChildSpec('sh', argv, tree.env))
        wait_until('it has ended', child.poll)
        assert child.log_tail(10_000) == tuple(map(str, range(2800, 3000)))
        child.wait()

    def test_endless_binary_output_without_a_newline_is_survived(self, tree: ProcessTree) -> None:
        """Memory stays bounded and a stop still works while it is being flooded."""
        child = started(ChildSpec('cat', ('/bin/cat', '/dev/urandom'), tree.env))
        wait_until('there is output', child.log_tail)
        assert all(len(line) <= 4000 for line in child.log_tail(10_000))
        child2 = started(ChildSpec('cat', ('/bin/cat', '/dev/zero'), tree.env))
        wait_until('the unfinished line is full', lambda: len(''.join(child2.log_tail())) == 4000)
        assert stop_all((child, child2), 'end of the test')

    def test_a_progress_bar_that_hangs_can_be_seen(self, tree: ProcessTree) -> None:
        """The last state of the unfinished line is part of the tail."""
        argv = ('/bin/sh', '-c', r"printf 'load 1%%\rload 50%%\r'; exec sleep 100")
        child = started(ChildSpec('sh', argv, {**tree.env, 'PATH': os.environ['PATH']}))
        wait_until('the bar is at 50 %', lambda: child.log_tail() == ('load 50%',))
        child.stop('end of the test')


class TestEnd:
    @pytest.mark.parametrize(
        ('status', 'text'),
        [
            (ExitStatus(0), 'exit status 0'),
            (ExitStatus(3), 'exit status 3'),
            (ExitStatus(-9), 'killed by SIGKILL'),
            (ExitStatus(-40), 'killed by signal 40'),
            (ExitStatus(-9, lost_lifeline=True), 'lost its lifeline'),
        ],
    )
    def test_an_end_reads_well(self, status: ExitStatus, text: str) -> None:
        assert str(status).startswith(text)

    def test_an_exit_by_itself_is_reported_with_its_status(self, tree: ProcessTree) -> None:
        child = started(tree.spec(env={'EXIT_CODE': '3'}))
        assert child.wait(PATIENCE_S) == ExitStatus(3)
        assert child.poll() == ExitStatus(3)

    @pytest.mark.parametrize('how', ['exits', 'killed'])
    def test_what_the_command_leaves_behind_is_gone_before_its_end_is_reported(
        self, tree: ProcessTree, how: str
    ) -> None:
        """A grandchild in its own session that ignores SIGTERM, as an engine core does."""
        env = {**GRANDCHILD, 'EXIT_CODE': '0'} if how == 'exits' else GRANDCHILD
        child = started(tree.spec(env=env))
        grandchild = report_of(child)['grandchild']
        if how == 'killed':
            assert state_of(grandchild) is not None
            os.kill(child.pid or 0, signal.SIGKILL)
        status = wait_until('the end is reported', child.poll)
        assert state_of(grandchild) is None
        assert not tree.pids()
        assert status == ExitStatus(-9 if how == 'killed' else 0)
        child.wait()

    def test_a_stop_lets_it_finish(self, tree: ProcessTree) -> None:
        """Its own handler of SIGTERM decides how it ends; a second stop changes nothing."""
        child = started(tree.spec(env={'SIGTERM_EXIT_CODE': '7'}))
        report_of(child)
        assert child.stop('a test')
        assert child.poll() == ExitStatus(7)
        assert child.stop('a test')
        assert child.kill('a test')
        assert child.poll() == ExitStatus(7)

    def test_a_stop_of_one_that_ignores_it_ends_with_kill_after_the_grace(
        self, tree: ProcessTree
    ) -> None:
        """Not before, and not long after; the grandchild goes with it."""
        child = started(tree.spec(env={**STUBBORN, **GRANDCHILD}, stop_grace_s=0.5))
        report_of(child)
        begin = time.monotonic()
        assert child.stop('a test')
        assert 0.5 <= time.monotonic() - begin < 0.5 + _process.KILL_BOUND_S
        assert child.poll() == ExitStatus(-9)
        assert not tree.pids()

    def test_a_kill_does_not_wait_for_the_grace(self, tree: ProcessTree) -> None:
        """Nor does one that comes while a stop is waiting."""
        child = started(tree.spec(env={**STUBBORN, **GRANDCHILD}, stop_grace_s=60.0))
        report_of(child)
        stopping = threading.Thread(target=child.stop, args=('a test',))
        stopping.start()
        begin = time.monotonic()
        assert child.kill('no more patience')
        stopping.join()
        assert time.monotonic() - begin < _process.KILL_BOUND_S
        assert child.poll() == ExitStatus(-9)

    @pytest.mark.parametrize('code', ['7', ''])
    def test_a_stopped_process_is_continued_so_that_it_can_end(
        self, tree: ProcessTree, code: str
    ) -> None:
        """SIGSTOP delays neither the handler of SIGTERM nor the KILL after the grace."""
        env = {'SIGTERM_EXIT_CODE': code} if code else STUBBORN
        child = started(tree.spec(env=env, stop_grace_s=5.0 if code else 0.3))
        report_of(child)
        pid = child.pid or 0
        os.kill(pid, signal.SIGSTOP)
        wait_until('it is stopped', lambda: state_of(pid) == 'T')
        assert child.poll() is None
        assert child.stop('a test')
        assert child.poll() == ExitStatus(int(code) if code else -9)

    def test_two_threads_can_stop_it_at_once(self, tree: ProcessTree) -> None:
        """Both return when it is gone."""
        child = started(tree.spec(env={**STUBBORN, **GRANDCHILD}, stop_grace_s=0.3))
        report_of(child)
        seen: list[tuple[bool, ExitStatus | None]] = []

        def stop() -> None:
            seen.append((child.stop('a test'), child.poll()))

        threads = [threading.Thread(target=stop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [(True, ExitStatus(-9))] * 2

    def test_several_stop_within_one_budget(self, tree: ProcessTree) -> None:
        """Five graces run at the same time; those never started do not matter."""
        spec = tree.spec(env=STUBBORN, stop_grace_s=0.8)
        children = [started(spec) for _ in range(5)]
        for child in children:
            report_of(child)
        begin = time.monotonic()
        assert stop_all((*children, ManagedProcess(spec)), 'a test')
        assert 0.8 <= time.monotonic() - begin < 5 * 0.8
        assert {child.poll() for child in children} == {ExitStatus(-9)}
        assert not tree.pids()

    def test_a_stop_from_the_output_callback_does_not_wait_for_itself(
        self, tree: ProcessTree
    ) -> None:
        """It is asked for, and the reader goes on to see the end."""
        answers: list[bool] = []
        spec = tree.spec(stop_grace_s=30.0)
        child = ManagedProcess(spec, lambda _: answers.append(child.stop('enough')))
        child.start()
        assert child.wait(PATIENCE_S) == ExitStatus(-15)
        assert answers == [False]

    def test_reasons_are_logged_without_the_environment(
        self, tree: ProcessTree, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A stop is information; who has something killed says so itself."""
        caplog.set_level(logging.DEBUG, logger=_process.__name__)
        one, two = (started(tree.spec(env={'TOKEN': 's3cret'})) for _ in range(2))
        one.stop('the pipeline is done')
        two.kill('it hangs')
        levels = {record.message: record.levelname for record in caplog.records}
        assert levels['fake: stopping: the pipeline is done'] == 'INFO'
        assert levels['fake: killing: it hangs'] == 'DEBUG'
        ours = [message for message in levels if ' | ' not in message]  # not the child's own
        assert not [message for message in ours if 's3cret' in message]
        assert 's3cret' not in repr(one.spec)

    def test_twenty_lives_leave_nothing_in_the_owner(self, tree: ProcessTree) -> None:
        """No descriptor, no thread, no zombie after each of several ways to end."""
        with nothing_left_in_this_process():
            for number in range(20):
                child = started(tree.spec(env={'EXIT_CODE': '1'} if number % 3 == 0 else {}))
                if number % 3 == 0:
                    assert child.wait(PATIENCE_S) == ExitStatus(1)
                elif number % 3 == 1:
                    assert child.stop('a test')
                else:
                    assert child.kill('a test')


class TestGuardLost:
    def test_a_killed_guard_is_noticed_and_its_descendants_are_swept(
        self, tree: ProcessTree
    ) -> None:
        """The kernel kills the command; the grandchild is found by its environment."""
        child = started(tree.spec(env={**STUBBORN, **GRANDCHILD, 'MEMORY_MIB': '400'}))
        grandchild = report_of(child)['grandchild']
        os.kill(guard_of(child), signal.SIGKILL)
        status = wait_until('the loss is noticed', child.poll)
        assert child.pid is not None
        assert state_of(child.pid) in (None, 'Z')  # the memory has been given back
        assert status == ExitStatus(-9, lost_lifeline=True)
        assert state_of(grandchild) in (None, 'Z')  # a zombie is its new parent's to collect
        assert not tree.pids()
        assert child.stop('nothing to do')

    def test_a_guard_that_is_stopped_does_not_delay_a_stop_for_ever(
        self, tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is killed when the budget is used up, and everything below it too."""
        monkeypatch.setattr(_process, 'KILL_BOUND_S', 0.3)
        child = started(tree.spec(env={**STUBBORN, **GRANDCHILD}, stop_grace_s=0.2))
        report_of(child)
        os.kill(guard_of(child), signal.SIGSTOP)
        begin = time.monotonic()
        assert child.stop('a test')
        assert time.monotonic() - begin < 0.5 + 2 * SWEEP_BOUND_S
        assert child.poll() == ExitStatus(-9, lost_lifeline=True)
        assert not tree.pids()


class TestOwner:
    def test_a_child_outlives_the_thread_that_started_it(self, tree: ProcessTree) -> None:
        """Bundle threads come and go; the child belongs to the process."""
        child = ManagedProcess(tree.spec())
        thread = threading.Thread(target=child.start)
        thread.start()
        task = pathlib.Path(f'/proc/self/task/{thread.native_id}')
        thread.join()
        report_of(child)
        wait_until('the thread is gone from the kernel', lambda: not task.exists())
        with pytest.raises(AssertionError, match='not within'):
            wait_until('the child ends', child.poll, timeout_s=0.5)
        assert runs(child.pid)
        child.stop('end of the test')

    @pytest.mark.parametrize('mode', ['killed', 'terminated', 'return', 'fork', 'multiprocessing'])
    def test_nothing_outlives_its_owner_by_ten_seconds(self, tree: ProcessTree, mode: str) -> None:
        """Not even a command and a grandchild that ignore SIGTERM; nor does a fork help it."""
        env = {**os.environ, **tree.env, **GRANDCHILD, 'PYTHONPATH': str(ROOT)}
        if mode == 'killed':
            env |= STUBBORN
        how = mode if mode in ('return', 'fork', 'multiprocessing') else 'wait'
        argv = (sys.executable, str(FAKES / 'owner.py'), how)
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            child, fork = map(int, owner.stdout.readline().split())
            if mode == 'return':
                owner.wait()
            else:
                assert state_of(child) is not None
                owner.send_signal(signal.SIGTERM if mode == 'terminated' else signal.SIGKILL)
                owner.wait()
            begin = time.monotonic()
            survivors = {fork} if fork else set()
            wait_until('only the fork is left', lambda: tree.pids() == survivors, timeout_s=10.0)
            assert time.monotonic() - begin < 10.0
            if fork:
                assert runs(fork)
                os.kill(fork, signal.SIGKILL)
                tree.wait_until_gone()

    def test_a_dropped_object_lets_its_child_go(self, tree: ProcessTree) -> None:
        """Garbage collection cuts the lifeline."""
        before = set(threading.enumerate())
        child = started(tree.spec())
        report_of(child)
        del child
        gc.collect()
        tree.wait_until_gone()
        wait_until('the reader has ended', lambda: set(threading.enumerate()) <= before)

    def test_a_fork_can_neither_use_nor_harm_the_child(self, tree: ProcessTree) -> None:
        """It has none of the pipes; every call tells it whose child it is."""
        before = set(fds_of().values())
        child = started(tree.spec())
        report_of(child)
        pipes = set(fds_of().values()) - before
        assert len(pipes) >= 3
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(RuntimeError, match='belongs to process'):
                    child.stop('from the fork')
                with pytest.raises(RuntimeError, match='belongs to process'):
                    child.wait()
                assert not pipes & set(fds_of().values())
                del child
                gc.collect()
            except BaseException:  # noqa: BLE001  a fork must not run the rest of the tests
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert child.poll() is None
        assert child.stop('end of the test')


class TestHeldDescriptors:
    def test_a_lock_is_held_until_the_last_descendant_is_gone(
        self, tree: ProcessTree, tmp_path: pathlib.Path
    ) -> None:
        """The next owner of the device cannot come before; the command does not see the lock."""
        path = tmp_path / 'device'
        child = ManagedProcess(tree.spec(env={**STUBBORN, **GRANDCHILD}, stop_grace_s=0.3))
        with path.open('w') as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child.start(hold_fds=[file.fileno()])
        report = report_of(child)
        assert str(path) not in fds_of(child.pid or 0).values()
        assert str(path) not in fds_of(report['grandchild']).values()
        with path.open('w') as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stopping = threading.Thread(target=child.stop, args=('a test',))
            stopping.start()
            fcntl.flock(file, fcntl.LOCK_EX)
            left = state_of(report['grandchild']), state_of(child.pid or 0)
            stopping.join()
        assert left == (None, None)

    def test_it_is_held_too_while_kill_does_not_end_them(
        self,
        tree: ProcessTree,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(_process, 'KILL_BOUND_S', 4.5)  # the shim speaks after three
        path = tmp_path / 'lock'
        child = ManagedProcess(tree.spec())
        with path.open('w') as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child.start(hold_fds=[file.fileno()])
        report_of(child)
        assert child.pid is not None
        with path.open('w') as file:
            with not_to_be_collected(child.pid):
                assert not child.kill('a test')
                assert child.left() == (child.pid,)
                assert child.poll() is None
                assert f'still there after KILL: ({child.pid},)' in caplog.text
                with pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert child.wait(PATIENCE_S) == ExitStatus(-signal.SIGKILL)
            assert child.left() == ()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
