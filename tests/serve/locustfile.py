"""What Locust's users do (see test_load_generator.py): short completions and chats, some of them streamed."""

import json

from locust import HttpUser, constant, task


class Reader(HttpUser):
    """A client that asks again when it was answered."""

    wait_time = constant(0)

    @task(2)
    def complete(self):
        with self.client.post("/v1/completions", json={"model": "tiny", "prompt": "once upon", "max_tokens": 8,
                                                       "ignore_eos": True}, catch_response=True) as answer:
            if answer.json()["usage"]["completion_tokens"] != 8:
                answer.failure("not the tokens that were asked for")

    @task(1)
    def chat(self):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line.decode().removeprefix("data: ") for line in answer.iter_lines() if line]
            if lines[-1] != "[DONE]" or json.loads(lines[-2])["choices"][0]["finish_reason"] is None:
                answer.failure("the stream did not end as it should")
