"""An environment made with verifiers: a chat of two turns, and a reward."""

import openai
import verifiers.v1 as vf

__all__ = ['Loop', 'Questions']


class Data(vf.TaskData):
  factor: float


class Ask(vf.Task[Data]):
  @vf.reward
  async def turns(self, trace) -> float:
    return self.data.factor * trace.num_turns


class Questions(vf.Taskset[Ask]):
  def load(self):
    for n in range(6):
      yield Ask(Data(prompt=f'Q{n}? ', factor=n), self.config.task)


class Loop(vf.Harness[vf.HarnessConfig]):
  """In this process: without uv, which `null` runs a program with."""

  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(
    self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
  ) -> vf.ProgramResult:
    messages = [{'role': 'user', 'content': data.prompt}]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
      for stream in (False, True):  # as `null` does
        more = dict(stream=True, stream_options={'include_usage': True})
        reply = await client.chat.completions.create(
          model=ctx.model, messages=messages, **(more if stream else {})
        )
        if stream:
          parts = [c.choices[0].delta async for c in reply if c.choices]
          said = ''.join(part.content or '' for part in parts)
        else:
          said = reply.choices[0].message.content
        if said.startswith('crash'):
          return vf.ProgramResult(exit_code=1, stdout='', stderr='I broke')
        messages.append({'role': 'assistant', 'content': said})
        messages.append({'role': 'user', 'content': ' and?'})
    return vf.ProgramResult(exit_code=0, stdout='', stderr='')
