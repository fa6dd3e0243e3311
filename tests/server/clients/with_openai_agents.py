"""openai-agents: tool loops over Responses and over chat completions."""

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from own_tools import TOOLS, URL, run_jobs

set_tracing_disabled(True)


def run(model_class: type, request: str, streamed: bool) -> str:
    async def loop() -> str:
        client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
        agent = Agent(
            name="coder",
            instructions="Repair.",
            model=model_class("octavo", openai_client=client),
            tools=[function_tool(tool) for tool in TOOLS],
            model_settings=ModelSettings(verbosity="low", prompt_cache_retention="24h"),
        )
        if not streamed:
            return (await Runner.run(agent, request)).final_output
        result = Runner.run_streamed(agent, request)
        assert [event async for event in result.stream_events()]
        return result.final_output

    return asyncio.run(loop())


def responses(request: str, streamed: bool) -> str:
    return run(OpenAIResponsesModel, request, streamed)


def chat(request: str, streamed: bool) -> str:
    return run(OpenAIChatCompletionsModel, request, streamed)


run_jobs(responses, chat)
