"""Serves a policy: OpenAI's chat completions, and a page to ask it on.

  python -m searchrl_jax.serve --workdir=runs/quickstart
  python -m searchrl_jax.serve --workdir=runs/a --beside=runs/b
  python -m searchrl_jax.serve --port=0 \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint

It prints the address of the page, with a key that is made at each start, and
the lines that let an OpenAI client use the policy. All but the page itself
needs the key (Authorization: Bearer KEY):

  GET  /                       the page
  GET  /v1/models              what is served: the names of run folders
  POST /v1/chat/completions    each request by itself, see `endpoint.app`
  POST /ask                    {"model", "question"}: plays the environment of
                               the run, as its evaluation; events as they come
  POST /save                   {"ids": [...]}: what was asked last, in the form
                               of `view`; answers with a zip of the page

A request that names another host, or comes from a page of another origin, is
refused: other sites could reach this one under a name of theirs otherwise (DNS
rebinding).
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import ipaddress
import pathlib
import secrets
import shutil
import signal
import time
from typing import Any
from urllib.parse import quote, urlsplit

from absl import flags
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from searchrl_jax import lookup, types, view
from searchrl_jax.devices.signals import Loop
from searchrl_jax.endpoint import app
from searchrl_jax.endpoint.app import HttpError
from searchrl_jax.endpoint.sessions import Reply, Request, Session
from searchrl_jax.endpoint.streaming import Tell
from searchrl_jax.engines.core import Sampling
from searchrl_jax.evaluate import play
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rollout.core import Event, RolloutError
from searchrl_jax.run import build, command, services
from searchrl_jax.store import folders, records

PAGE = pathlib.Path(app.__file__).with_name('page.html')
_CHOICES = 16  # the most replies to one request
_WAITING = 64  # requests beyond the slots, which the engine serves in order
_KEPT = 100  # played questions that can be saved
# Of the page: no script, style or connection but its own, no text as markup.
_RULES = (
  "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; "
  "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'; trusted-types 'none'; "
  "require-trusted-types-for 'script'"
)


class Policy:
  """A policy under the name by which clients choose it."""

  def __init__(self, name: str, player: play.Player):
    self.name, self.player = name, player
    self._tasks: set[Any] = set()
    self._most, self._closing = player.config.engine.slots + _WAITING, False

  @contextlib.contextmanager
  def admitted(self):
    """Counts this task as one of its requests.

    Raises:
      HttpError: there are too many, or the server stops.
    """
    if len(self._tasks) >= self._most:
      what = f'{self._most} requests are under way or wait; try again later'
      again = {'Retry-After': '1'}
      raise HttpError(429, what, code='rate_limit_exceeded', headers=again)
    task = asyncio.current_task()
    self._tasks.add(task)
    try:
      yield
    except asyncio.CancelledError:
      if self._closing:
        raise HttpError(503, 'the server is stopping') from None
      raise
    finally:
      self._tasks.discard(task)

  def close(self) -> None:
    """Ends what is under way."""
    self._closing = True
    for task in self._tasks:
      task.cancel()

  async def reply(self, request: Request, tell: Tell | None = None) -> Reply:
    """The reply to a request with a seed, in a session of its own."""
    config, warm = self.player.config, request.temperature
    warm = config.eval.temperature if warm is None else warm
    session = Session(
      types.Question('chat', ''),
      0,
      engine=self.player.have.opener.engine,
      tokenizer=self.player.have.tok,
      sampling=Sampling(1, warm, request.top_p or config.eval.top_p),
      seeds=lambda context: request.seed,
      limits=config.env,
    )
    with self.admitted(), contextlib.closing(session):
      return await session.reply(request, tell)


def make(policies: Sequence[Policy], key: str, host: str = '') -> Starlette:
  """The application.

  host: a name of this machine, beside its addresses and localhost.
  """
  named = {policy.name: policy for policy in policies}
  style = view.PAGE.read_text('utf-8')
  colours = style[style.index(':root {') :].partition('\n}')[0] + '\n}'
  kept: dict[str, tuple[Policy, types.Trajectory]] = {}  # by id

  def chosen(fields: dict[str, Any]) -> Policy:
    name = fields.get('model')
    if not isinstance(name, str) or name not in named:
      what = f'model={name!r:.80}: there is {" and ".join(named)}'
      raise HttpError(404, what, 'model', 'model_not_found')
    return named[name]

  async def completions(http: HttpRequest) -> ASGIApp:
    fields = await app.read_body(http)
    policy, (request, shown) = chosen(fields), app.read(fields, _CHOICES)
    seed = secrets.randbits(32) if request.seed is None else request.seed
    seeds = [(seed + n) % (1 << 32) for n in range(shown['n'])]
    each = [dataclasses.replace(request, seed=seed) for seed in seeds]
    asks = [functools.partial(policy.reply, one) for one in each]
    about = shown, policy.name, policy.player.have.tok
    return await app.respond(http, asks, request, *about)

  async def ask(http: HttpRequest) -> ASGIApp:
    fields = await app.read_body(http)
    policy, text = chosen(fields), fields.get('question')
    if not isinstance(text, str) or not text.strip():
      raise HttpError(400, 'question: expected a text', 'question')
    player, name = policy.player, f'ask-{folders.digest(text)[:8]}'
    most = player.config.env.max_tokens
    # Others would wait while megabytes are tokenised, which cannot fit.
    if len(text) > most * player.have.tok.max_token_bytes:
      said = f'question: {len(text)} characters, for {most} tokens'
      raise HttpError(422, f'{said} (config.env.max_tokens)', 'question')

    async def work(tell: app.Tells) -> None:
      show = lambda _, event: tell(_shown(player.have.tok, event))
      try:
        with policy.admitted():
          found = await player.play(text, show, name)
      except (ValueError, RolloutError) as e:
        raise HttpError(422, str(e)) from e
      id, answer = secrets.token_hex(8), player.env.answer(found)
      kept[id] = policy, found
      while len(kept) > _KEPT:
        del kept[next(iter(kept))]
      about = {'searches': len(found.searches), 'tokens': len(found)}
      about |= {'end': found.end, 'seconds': round(found.seconds, 2)}
      tell({'id': id, 'answer': answer} | about)

    return await app.stream(http, work)

  async def save(http: HttpRequest) -> Response:
    ids = app.texts((await app.read_body(http)).get('ids'))
    found = {i: kept[i] for i in ids if i in kept}
    if not found or len({t.question.id for _, t in found.values()}) > 1:
      what = f'ids: expected some of the last {_KEPT} answers, to one question'
      raise HttpError(400, what, 'ids')
    page, packed = await asyncio.to_thread(_save, found)
    where = {'X-Page': quote(str(page))}
    return FileResponse(packed, filename='session.zip', headers=where)

  async def models(http: HttpRequest) -> Response:
    return app.listed(named)

  async def page(http: HttpRequest) -> Response:
    nonce = secrets.token_urlsafe(16)
    text = PAGE.read_text('utf-8').replace('{{nonce}}', nonce)
    text = text.replace('{{colours}}', colours)
    rules = {'Content-Security-Policy': _RULES.format(nonce)}
    return HTMLResponse(text, headers=rules | {'Cache-Control': 'no-store'})

  def route(path: str, answer: Callable, method: str = 'POST') -> Route:
    async def checked(http: HttpRequest) -> Response:
      _require_own(http, host)
      if answer is not page:
        given = app.key_of(http).encode()
        if not secrets.compare_digest(given, key.encode()):
          raise HttpError(401, 'this is not the key that was printed')
      return await answer(http)

    return Route(path, checked, methods=[method])

  routes = [
    route('/', page, 'GET'),
    route('/v1/models', models, 'GET'),
    route('/v1/chat/completions', completions),
    route('/ask', ask),
    route('/save', save),
  ]
  return Starlette(routes=routes, exception_handlers=app.HANDLERS)


def _require_own(http: HttpRequest, host: str) -> None:
  """Raises HttpError for another host than this, or a page of another."""
  asked, origin = http.headers.get('host', ''), http.headers.get('origin')
  try:
    name = urlsplit(f'//{asked}').hostname
    # Only a name can be made to lead here by whoever owns it.
    named = name in ('localhost', host.lower())
    own = named or bool(ipaddress.ip_address(name))
  except ValueError:
    own = False
  if not own or origin not in (None, f'http://{asked}', f'https://{asked}'):
    what = f'Host: {asked!r:.80}, Origin: {origin!r:.80}: not of this server'
    raise HttpError(403, f'{what}; use its address, or --host=NAME')


def _shown(tok, event: Event) -> dict[str, Any]:
  """An event as the page reads it."""
  if isinstance(event, types.Segment):
    text = tok.decode(event.ids)
    return {'author': event.author, 'kind': event.kind, 'text': text}
  if isinstance(event, types.SearchRequest):
    return {'asks': {'tool': event.tool, 'query': event.query}}
  return {'found': records.plain(view.searched(event))}


def _save(
  found: dict[str, tuple[Policy, types.Trajectory]],
) -> tuple[pathlib.Path, str]:
  """Writes what was played as runs, their page, and a zip of the page.

  Returns:
    The paths of page and zip.

  Raises:
    RunError: a folder cannot be written to.
  """
  runs, now = [], time.strftime('%m%d-%H%M%S')
  for id, (policy, trajectory) in found.items():
    home, tok = pathlib.Path(policy.player.folder), policy.player.have.tok
    if not (home / records.TOKENIZER).exists():  # `read` looks there
      tok.save(home / records.TOKENIZER)
    runs.append(run := home / f'{policy.name}-{now}-{id}')
    records.write_json(run / 'config.json', policy.player.config)
    records.write_text(run / 'metrics.jsonl', '')
    played = records.encode([records.Record(0, trajectory)])
    records.write_bytes(records.step_file(run / 'eval', 0), played)
  page = runs[0] / 'page' / 'session.html'
  view.write(str(runs[0]), page, against=''.join(map(str, runs[1:2])))
  name = str(runs[0] / 'session')
  return page, shutil.make_archive(name, 'zip', page.parent)


# The command.


async def _serve(policies: Sequence[Policy], key: str) -> None:
  """Serves until it is cancelled."""
  host, port = _HOST.value, _PORT.value
  where = f'--host={host} --port={port} (0 takes a free one)'
  with lookup.of(where, caught=OSError):
    async with app.serving(make(policies, key, host), host, port) as url:
      names = ', '.join(policy.name for policy in policies)
      print(
        f'\n{url.removesuffix("v1")}#{key}  (the page; Ctrl-C ends)\n\n'
        f'export OPENAI_BASE_URL={url}\nexport OPENAI_API_KEY={key}\n'
        f'# models: {names}',
        flush=True,
      )
      try:
        await asyncio.Event().wait()
      finally:
        for policy in policies:
          policy.close()


def main():
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  asked = [(_CONFIG.value, _WORKDIR.value or '', _CHECKPOINT.value)]
  if beside := _BESIDE.value:
    config = build.load_config(beside)
    services.require_alone(config, build.any_mesh(config), '--beside')
    asked.append((config, beside, _BESIDE_CHECKPOINT.value))
  policies: list[Policy] = []
  interrupted = contextlib.suppress(KeyboardInterrupt)
  # The loop closes engines and sources before their servers and folders end.
  with interrupted, contextlib.ExitStack() as stack, Loop() as loop:
    for home, (config, workdir, which) in zip(('serve', 'serve_beside'), asked):
      name = pathlib.Path(workdir).absolute().name if workdir else config.name
      name += '-beside' * any(name == policy.name for policy in policies)
      print(f'loading {name} ...', flush=True)
      how = home, _SLOTS.value, loop
      player = stack.enter_context(play.opened(config, workdir, which, *how))
      player.have.opener.engine.warmup()
      policies.append(Policy(name, player))
    served = loop.start(_serve(policies, secrets.token_urlsafe(32)))
    try:
      while not served.done():  # a signal is handled between two waits
        futures.wait([served], 1)
      served.result()
    finally:
      loop.cancel(served)


if __name__ == '__main__':
  _CONFIG, _WORKDIR = evaluate.define_config_and_workdir()
  _CHECKPOINT = command.define_checkpoint()
  text, number = flags.DEFINE_string, flags.DEFINE_integer
  _BESIDE = text('beside', '', 'Another run: both get the same question.')
  which = 'Of --beside: latest, best, or a step.'
  _BESIDE_CHECKPOINT = text('beside_checkpoint', 'latest', which)
  _HOST = text('host', '127.0.0.1', 'Address; 0.0.0.0 is open to the network.')
  _PORT = number('port', 8000, 'Its port; 0: any free one.', 0)
  _SLOTS = number('slots', 4, 'Answers at a time.', 1)
  command.run(main)
