"""crewai: an agent with tools, over chat completions."""

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from own_tools import TOOLS, URL, run_jobs


def chat(request: str, streamed: bool) -> str:
    model = LLM(model="openai/octavo", base_url=f"{URL}/v1", api_key="none", stream=streamed)
    agent = Agent(
        role="coder",
        goal="Repair.",
        backstory="A coder.",
        llm=model,
        tools=[tool(t) for t in TOOLS],
        max_iter=8,
    )
    task = Task(description=request, expected_output="The answer.", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff().raw


run_jobs(chat)
