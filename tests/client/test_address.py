"""Where a client looks its server up: by the models that are in use, and by no others."""

from __future__ import annotations

import gc
import weakref

import pytest

from apache_beam_vllm_dynamo import RuntimeFailedError
from apache_beam_vllm_dynamo._clients import Address


class Model:
    """Knows where the server is until Beam takes it away."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.released = False

    def endpoint(self) -> str:
        if self.released:
            raise RuntimeError('Entry was released.')
        return self.url

    def __eq__(self, other: object) -> bool:
        raise AssertionError('a proxy is compared in another process')

    __hash__ = object.__hash__


def test_the_latest_model_in_use_is_asked() -> None:
    address, first, second = Address(), Model('first'), Model('second')
    with address.through(first):
        with address.through(second):
            assert address() == 'second'
        assert address() == 'first'
    with pytest.raises(RuntimeFailedError, match='closed'):
        address()


def test_a_model_may_be_in_use_twice() -> None:
    address, model = Address(), Model('it')
    with address.through(model):
        with address.through(model):
            pass
        assert address() == 'it'


def test_a_model_that_is_let_go_while_it_is_asked_speaks_for_nobody_else() -> None:
    """Two threads share a client, each with a proxy of its own."""
    address, first, second = Address(), Model('first'), Model('second')
    uses = address.through(second)

    def let_go() -> str:
        uses.__exit__(None, None, None)
        raise RuntimeError('Entry was released.')

    second.endpoint = let_go  # type: ignore[method-assign]  # the moment of a race
    with address.through(first):
        uses.__enter__()
        assert address() == 'first'


def test_what_a_model_in_use_raises_is_raised() -> None:
    address, model = Address(), Model('it')
    model.released = True
    with address.through(model), pytest.raises(RuntimeError, match='released'):
        address()


def test_no_model_is_held_after_its_use() -> None:
    address, model = Address(), Model('it')
    with address.through(model):
        address()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
