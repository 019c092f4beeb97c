"""The demo model, spoken to as OpenAI clients do."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.demo_model import DemoModel
from envbus.demo_model.answers import Conversation, answer
from envbus.demo_model.arithmetic import evaluate, find_expression, numbers_in
from envbus.demo_model.completions import tokenize
from envbus.errors import UsageError

REVERSE = [
    {"role": "system", "content": "Reverse the text. Put only your answer in <reversed_text> tags."},
    {"role": "user", "content": "The quick brown fox jumps over the lazy dog."},
]
REVERSED = "<reversed_text>.god yzal eht revo spmuj xof nworb kciuq ehT</reversed_text>"


def tool(name, description="", **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@pytest.fixture
def demo():
    with DemoModel.start(seed=1) as demo:
        yield demo


@pytest.fixture
async def client(demo):
    async with openai.AsyncOpenAI(base_url=demo.base_url, api_key="none", max_retries=0) as client:
        yield client


async def ask(client, messages=REVERSE, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def texts_of(client, count=8, **options):
    return [(await ask(client, **options)).choices[0].message.content for _ in range(count)]


async def test_models_are_listed(demo, client):
    assert [model.id async for model in client.models.list()] == [demo.model]


async def test_repeats_differ_are_partly_right_and_a_rerun_repeats_them(client):
    first = await texts_of(client, 16)
    assert 4 < first.count(REVERSED) < 16
    with DemoModel.start(seed=1) as again, DemoModel.start(seed=2) as other:
        for demo, same in ((again, True), (other, False)):
            async with openai.AsyncOpenAI(base_url=demo.base_url, api_key="none") as fresh:
                assert (await texts_of(fresh, 16) == first) is same


async def test_a_seed_in_the_request_fixes_the_answer(client):
    bodies = [(await ask(client, seed=seed)).to_dict() for seed in (5, 5, *range(20))]
    assert bodies[0] == bodies[1] == bodies[7]
    assert len({body["choices"][0]["message"]["content"] for body in bodies}) > 1


async def test_token_ids_logprobs_and_usage_agree(client):
    """The vLLM form: ids on request, one per token."""
    body = (await ask(client, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True})).to_dict()
    (choice,) = body["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert len(tokens) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert all(token["logprob"] <= 0 and token["top_logprobs"] for token in tokens)
    plain = (await ask(client)).to_dict()
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0].get("logprobs") is None


async def test_a_stream_says_the_same_as_a_whole_answer(client):
    whole = await ask(client, seed=3)
    stream = await ask(client, seed=3, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert len(deltas) > 5
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


async def test_a_tool_is_called_and_its_result_reported(client):
    tools = [
        tool("search", "Search the web", query={"type": "string"}),
        tool("multiply", "Multiply two numbers", a={"type": "integer"}, b={"type": "number"}),
    ]
    messages = [{"role": "user", "content": "Multiply 6 and 7. Answer in \\boxed{}."}]
    replies = [(await ask(client, messages, tools=tools)).choices[0] for _ in range(10)]
    called = [reply for reply in replies if reply.finish_reason == "tool_calls"]
    assert 6 <= len(called) <= 10
    message = called[0].message
    assert message.tool_calls[0].function.name == "multiply"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 6, "b": 7.0}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42.0"}
    after = [*messages, message.to_dict(), result]
    finals = [(await ask(client, after, tools=tools)).choices[0].message.content for _ in range(10)]
    assert 5 <= finals.count("The answer is \\boxed{42.0}.") <= 10
    streamed = [chunk async for chunk in await ask(client, messages, tools=tools, seed=1, stream=True)]
    assert streamed[1].choices[0].delta.tool_calls[0].function.name == "multiply"


async def test_max_tokens_cuts_the_answer(client):
    reply = await ask(client, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


async def test_a_prompt_over_the_context_length_is_refused():
    with DemoModel.start(context_length=50) as demo:
        async with openai.AsyncOpenAI(base_url=demo.base_url, api_key="none") as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 50 tokens" in caught.value.message


async def test_scripted_faults_come_in_order(demo, client):
    demo.fail_next(429, 500, "disconnect", 200, "empty", "garbage")
    for kind in (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError):
        with pytest.raises(kind):
            await ask(client)
    assert (await ask(client)).choices[0].message.content
    assert (await ask(client)).choices[0].message.content == ""
    with pytest.raises(json.JSONDecodeError):
        await ask(client)
    assert demo.requests == 6


async def test_many_connections_at_once_with_a_delay_take_one_delay():
    with DemoModel.start(delay_s=0.3) as demo:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=20) as client:
            body = {"model": "any", "messages": REVERSE}
            start = time.perf_counter()
            url = f"{demo.base_url}/chat/completions"
            replies = await asyncio.gather(*(client.post(url, json=body) for _ in range(100)))
            took_s = time.perf_counter() - start
    assert Counter(reply.status_code for reply in replies) == {200: 100}
    assert 0.3 <= took_s < 10  # one after another they would take 30


def test_it_answers_while_the_callers_loop_is_blocked(demo):
    async def blocking():
        return httpx.get(f"{demo.base_url}/models", timeout=5).status_code  # noqa: ASYNC210 - blocking is the point

    assert asyncio.run(blocking()) == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("POST", "/chat/completions", b"{", 400),
        ("POST", "/chat/completions", b"[]", 400),
        ("POST", "/chat/completions", b'{"messages": []}', 400),
        ("POST", "/chat/completions", b'{"messages": [{"role": "user"}], "n": 2}', 400),
        ("POST", "/chat/completions", b'{"messages": [{"role": "user"}]}', 200),
    ],
)
def test_bad_requests_get_an_error_and_the_connection_lives(demo, method, path, body, status):
    with httpx.Client() as client:
        for _ in range(2):
            reply = client.request(method, demo.base_url + path, content=body)
            assert reply.status_code == status
            assert ("error" in reply.json()) == (status != 200)


def test_stop_ends_calls_connections_and_the_thread():
    before = threading.active_count()
    demo = DemoModel.start(delay_s=600)
    failed: list[Exception] = []

    def call():
        try:
            httpx.post(f"{demo.base_url}/chat/completions", json={"messages": REVERSE}, timeout=60)
        except httpx.HTTPError as exc:
            failed.append(exc)

    caller = threading.Thread(target=call)
    caller.start()
    while demo.requests == 0:
        caller.join(0.005)
    demo.stop()
    demo.stop()
    caller.join(5)
    assert len(failed) == 1
    assert threading.active_count() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{demo.base_url}/models")


def test_a_port_that_is_taken_is_a_usage_error(demo):
    with pytest.raises(UsageError, match="cannot listen"):
        DemoModel.start(port=int(demo.base_url.split(":")[2].split("/")[0]))


def test_it_runs_as_a_module_and_stops_on_sigterm():
    command = [sys.executable, "-m", "envbus.demo_model", "--port", "0", "--model", "named"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "named"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_importing_it_is_light_and_starting_it_quick():
    code = (
        "import sys, time; from envbus.demo_model import DemoModel; start = time.perf_counter();"
        "demo = DemoModel.start(); took_s = time.perf_counter() - start; demo.stop();"
        "print(took_s < 0.5, sorted({'openai', 'httpx', 'datasets', 'nats'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True []"


class FixedLuck:
    """A random number generator that always draws the same side."""

    def __init__(self, draw):
        self.draw = draw

    def random(self):
        return self.draw

    def choice(self, options):
        return options[0]

    def randint(self, low, high):
        return low


LUCKY, UNLUCKY = FixedLuck(0.0), FixedLuck(0.9)


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        ("Reverse the text: one two", "owt eno", "two one"),
        ("What is 12 + 7 * 3?", "33", "34"),
        ("What is (12 + 8) / 8? Put it in \\boxed{}.", "The answer is \\boxed{2.5}.", "The answer is \\boxed{3.5}."),
        ("Use <think> and <answer> tags: 6 \u00d7 7 =", "<answer>42</answer>", "<answer>43</answer>"),
    ],
)
def test_answers_are_partly_right(task, right, wrong):
    conversation = Conversation([{"role": "user", "content": task}])
    assert answer(conversation, LUCKY).text == right
    assert answer(conversation, UNLUCKY).text == wrong


def test_a_word_problem_gets_a_number():
    parts = [{"type": "text", "text": "Tom has 3 apples and buys 1,200 more. How many?"}]
    assert answer(Conversation([{"role": "user", "content": parts}]), LUCKY).text == "1203"


@given(secret=st.integers(1, 100))
def test_guessing_halves_the_range(secret):
    messages = [
        {"role": "system", "content": "Guess my number between 1 and 100. Reply <guess>N</guess>."},
        {"role": "user", "content": "Make your first guess."},
    ]
    for _ in range(7):
        reply = answer(Conversation(messages), LUCKY).text
        guess = int(numbers_in(reply)[0])
        assert reply == f"<guess>{guess}</guess>"
        if guess == secret:
            return
        feedback = "My number is higher." if guess < secret else "Too high!"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": feedback}]
    pytest.fail("seven guesses are enough for a hundred numbers")


@given(st.text())
def test_tokens_join_to_the_text(text):
    assert "".join(tokenize(text)) == text


@given(st.text("0123456789+-*/(). ", max_size=60))
def test_any_text_is_worked_out_or_refused(text):
    found = find_expression(text)
    assert found is None or evaluate(found) is not None


def test_arithmetic_takes_nothing_else():
    for text in ("__import__('os')", "2 ** 9", "1 / 0", "(", "1+" * 300 + "1"):
        assert evaluate(text) is None
