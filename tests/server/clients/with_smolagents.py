"""smolagents: a loop of its ToolCallingAgent, whose last answer is a call as well."""

from own_tools import TOOLS, URL, run_jobs
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

MODEL = OpenAIModel("octavo", api_base=f"{URL}/v1", api_key="none")


def chat(request: str, streamed: bool) -> str:
    agent = ToolCallingAgent(
        [tool(function) for function in TOOLS], MODEL, stream_outputs=streamed, verbosity_level=LogLevel.OFF
    )
    return agent.run(request)


run_jobs(chat)
