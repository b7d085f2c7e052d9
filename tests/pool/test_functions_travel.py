"""Ways in which users' functions, classes and modules reach a node, run as the scripts that users run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
import skyward as sky
pool = sky.ComputePool(sky.Local(), logs=False).start()
"""


def run_script(folder: Path, body: str, **modules: str) -> str:
    """Run a script in its own folder. Returns its output."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(body) + "\npool.close()\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_function_that_is_edited_between_calls_is_sent_again(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        factor, seen = 2, [1]

        @sky.compute
        def f(x):
            return factor * x + len(seen)

        print(f(10) >> pool)
        factor = 3                     # another global
        print(f(10) >> pool)
        seen.append(2)                 # a global that was changed in place
        print(f(10) >> pool)

        def helper(x): return x + 1
        @sky.compute
        def g(x): return helper(x)
        print(g(1) >> pool)
        def helper(x): return x + 100  # a function that it calls
        print(g(1) >> pool)

        @sky.compute
        def f(x):                      # the function itself
            return -x
        print(f(10) >> pool)
        """,
    )
    assert said.split() == ["21", "31", "32", "2", "101", "-10"]


def test_a_local_module_travels_by_name_and_keeps_its_state_in_the_slot(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import mine
        print([mine.count() >> pool for _ in range(3)], mine.calls)
        print(pool.map(mine.plain, [1, 2]))
        """,
        mine="""
        import skyward as sky
        calls = 0
        @sky.compute
        def count():
            global calls
            calls += 1
            return calls
        def plain(x):
            return x * 10
        """,
    )
    assert said.splitlines() == ["[1, 2, 3] 0", "[10, 20]"]


def test_instances_of_classes_of_main_keep_their_class(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from enum import Enum

        class Colour(Enum):
            RED = 1

        @dataclass
        class Point:
            x: int
            colour: Colour = Colour.RED
            def moved(self, by):
                return Point(self.x + by)

        class Mistake(Exception):
            pass

        @sky.compute
        def move(p):
            assert isinstance(p, Point)
            return p.moved(1)

        @sky.compute
        def fail():
            raise Mistake("mine")

        back = move(Point(1)) >> pool
        print(isinstance(back, Point), back == Point(2), back.colour is Colour.RED)
        try:
            fail() >> pool
        except Mistake as error:
            print("caught", error)
        """,
    )
    assert said.splitlines() == ["True True True", "caught mine"]


def test_classes_and_globals_of_a_script_stay_as_they_are_when_values_come_back(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from enum import Enum
        from skyward.errors import SkywardError

        seen, kinds = [], []

        class Base:
            def __init_subclass__(cls):
                kinds.append(cls.__name__)

        class Model(Base):
            steps = 0
            def train(self):
                seen.append("trained")
                return self

        class Colour(Enum):
            RED = 1
            def see(self):
                seen.append(self.name)

        class Mistake(Exception):
            def see(self):
                seen.append("mistake")

        @sky.compute
        def make(model, fails=False):
            Model.steps += 1
            if fails:
                raise Mistake
            return model.train(), Colour.RED, Model

        train = Model.train
        model, colour, kind = make(Model()) >> pool
        model.train()
        colour.see()
        try:
            make(model, fails=True) >> pool
        except Mistake as mistake:
            mistake.see()
        [again] = [value[0] for value in pool.map(make.fn, [model])]
        again.train()
        print(seen, kinds, Model.steps, Model.train is train, kind is Model, type(again) is Model)
        """,
    )
    assert said.strip() == "['trained', 'RED', 'mistake', 'trained'] ['Model'] 0 True True True"


def test_a_class_that_was_changed_in_place_comes_changed(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        class Model:
            rate = 1
            def predict(self):
                return self.rate

        @sky.compute
        def predict(model):
            return model.predict()

        print(predict(Model()) >> pool)
        Model.rate = 2
        print(predict(Model()) >> pool)
        Model.predict = lambda self: 3
        print(predict(Model()) >> pool)
        """,
    )
    assert said.split() == ["1", "2", "3"]


def test_functions_and_classes_of_a_script_are_found_by_name_in_a_task(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import __main__
        import pickle, sys
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        class Model:
            class Config:
                pass
            def __init__(self):
                self.config = Model.Config()
            def __eq__(self, other):
                return type(self) is type(other)

        def double(x):
            return 2 * x

        @sky.compute
        def in_processes(xs):
            with ProcessPoolExecutor(2, mp_context=get_context("fork")) as processes:
                return list(processes.map(double, xs))

        @sky.compute
        def by_name(model):
            found = sys.modules["__main__"]
            own = found.double is double and found.Model is Model
            return own, pickle.loads(pickle.dumps(model)) == model, pickle.loads(pickle.dumps([Model(), double]))[1](3)

        @sky.compute
        def of_an_argument(model, function):
            return [pickle.loads(pickle.dumps(each)) == each for each in (model, function)]

        @sky.compute
        def what_is_missing():
            import __main__
            return hasattr(__main__, "__file__"), hasattr(__main__, "nothing"), __main__.__name__

        for _ in range(2):  # each function has brought its own `double`
            print(in_processes([1, 2, 3]) >> pool, by_name(Model()) >> pool)
        print(of_an_argument(Model(), double) >> pool, what_is_missing() >> pool)
        print(pickle.loads(pickle.dumps(double)) is double, __main__.Model is Model)
        """,
    )
    once = "[2, 4, 6] (True, True, 6)"
    assert said.splitlines() == [once, once, "[True, True] (False, False, '__main__')", "True True"]


def test_classes_with_slots_keep_them(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from enum import Enum
        from typing import NamedTuple

        @dataclass(slots=True)
        class Point:
            x: int

        class Base:
            __slots__ = "own"

        class Private(Base):
            __slots__ = ("__hidden", "shown")
            def __init__(self, x):
                self.__hidden, self.shown, self.own = x, x + 1, x + 2
            def both(self):
                return self.__hidden, self.shown, self.own

        class Slotted(Exception):
            __slots__ = ("code",)

        class Pair(NamedTuple):
            first: int
            second: int = 2

        class Colour(Enum):
            __slots__ = ()
            RED = 1

        @sky.compute
        def take(point, private, fails=False):
            if fails:
                raise Slotted("no")
            assert (Pair(1), Pair(1).second, Colour.RED.value) == ((1, 2), 2, 1)
            return point, private, private.both(), hasattr(point, "__dict__"), Point(point.x + 1), Private(5)

        point, private, both, has_dict, other, made = take(Point(1), Private(2)) >> pool
        print(point, private.both(), both, has_dict, other, made.both(), type(point) is Point, pool.map(Point, [7]))
        try:
            take(Point(1), Private(2), fails=True) >> pool
        except Slotted as error:
            print("caught", error)
        """,
    )
    lines = said.splitlines()
    assert lines[0] == "Point(x=1) (2, 3, 4) (2, 3, 4) False Point(x=2) (5, 6, 7) True [Point(x=7)]"
    assert lines[1] == "caught no"


def test_objects_of_a_manager_are_shared_with_tasks(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        from multiprocessing import Manager

        @sky.compute
        def work(i, done, lock, told):
            with lock:
                done[i] = i * i
            told.append(i)
            return done

        if __name__ == "__main__":
            with Manager() as manager:
                done, told = manager.dict(), manager.list()
                backs = pool.map(lambda i, lock=manager.Lock(): work.fn(i, done, lock, told), range(3))
                print(dict(done), sorted(told), dict(backs[0]))
        """,
    )
    assert said.splitlines() == ["{0: 0, 1: 1, 2: 4} [0, 1, 2] {0: 0, 1: 1, 2: 4}"]


def test_methods_partials_lambdas_and_recursive_functions_travel(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import functools, operator

        class Scale:
            def __init__(self, by): self.by = by
            def of(self, x): return self.by * x
            @sky.compute
            def later(self, x): return self.by * x
            @classmethod
            def name(cls): return cls.__name__
            def __call__(self, x): return x + self.by

        @sky.compute
        def factorial(n):
            return 1 if n == 0 else n * factorial.local(n - 1)

        scale = Scale(3)
        print(sky.compute(scale.of)(2) >> pool, scale.later(5) >> pool, sky.compute(Scale.name)() >> pool)
        print(pool.map(functools.partial(pow, 2), [1, 2, 3]), pool.map(lambda x: -x, [1]), pool.map(scale, [1]))
        print(factorial(10) >> pool, pool.map(operator.neg, [4]), pool.map(str.upper, ["a"]))
        """,
    )
    assert said.splitlines() == ["6 15 Scale", "[2, 4, 8] [-1] [4]", "3628800 [-4] ['A']"]


def test_cached_and_dispatched_functions_of_a_script_travel(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import functools

        @functools.lru_cache(maxsize=None)
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        @functools.singledispatch
        def size(x):
            return 1

        @size.register
        def _(x: list):
            return sum(size(item) for item in x)

        @size.register(str)
        def _(x):
            return len(x)

        @sky.compute
        def both(n):
            return fibonacci(n), size([["a", "bc"], 3])

        print(both(90) >> pool, sky.compute(fibonacci)(91) >> pool, sky.compute(size)(["abc"]) >> pool)

        @sky.compute
        @functools.cache
        def doubled(x):
            print("once")
            return 2 * x

        print([doubled(4) >> pool for _ in range(3)])
        """,
    )
    assert said.splitlines() == ["(2880067194370816120, 4) 4660046610375530309 3", "[8, 8, 8]"]


def test_classes_with_cached_properties_travel(tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        """
        import functools

        class Config:
            \"\"\"Settings.\"\"\"

            @functools.cached_property
            def size(self):
                print("once")
                return 3

        @sky.compute
        def sizes(config):
            return config.size, config.size, vars(config)

        print(sizes(Config()) >> pool)
        """,
    )
    assert said == "(3, 3, {'size': 3})\n"


@pytest.mark.parametrize("how", ["return total", "return nested(3)"])
def test_nested_functions_and_closures_travel(tmp_path: Path, how: str) -> None:
    said = run_script(
        tmp_path,
        f"""
        def make(start):
            total = start
            def nested(n):
                return total if n == 0 else nested(n - 1)
            @sky.compute
            def call():
                {how}
            return call
        print(make(7)() >> pool)
        """,
    )
    assert said.split() == ["7"]
