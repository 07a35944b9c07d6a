"""A real Chromium without a screen, for pages that open from disk."""

import pathlib
import shutil

FIX = 'install chromium and chromium-driver (Debian) and selenium (PyPI)'


def missing() -> str:
  """What keeps `chromium` from working here; '' if nothing does."""
  try:
    import selenium  # noqa: F401
  except ImportError:
    return f'no selenium: {FIX}'
  absent = [n for n in ('chromium', 'chromedriver') if not shutil.which(n)]
  return f'no {" and no ".join(absent)}: {FIX}' if absent else ''


def chromium(profile: pathlib.Path):
  """Starts Chromium; a context manager. `profile` is a folder of its own."""
  from selenium import webdriver

  options = webdriver.ChromeOptions()
  options.binary_location = shutil.which('chromium')
  for flag in (
    'headless=new',
    'no-sandbox',  # it does not start for root with one
    'disable-dev-shm-usage',
    'hide-scrollbars',
    'window-size=1440,900',
    f'user-data-dir={profile}',
  ):
    options.add_argument(f'--{flag}')
  logs = {'browser': 'ALL', 'performance': 'ALL'}  # messages and requests
  options.set_capability('goog:loggingPrefs', logs)
  service = webdriver.ChromeService(shutil.which('chromedriver'))
  return webdriver.Chrome(options=options, service=service)


class Page:
  """What the tests ask of a page; `shown`: what it has once it is there."""

  shown = ''

  def __init__(self, browser, url):
    self._browser = browser
    browser.get('about:blank')
    browser.get(url)
    self.wait(f'document.querySelector({self.shown!r})')

  def js(self, code, *args):
    return self._browser.execute_script(f'return {code}', *args)

  def wait(self, condition):
    """Until a JavaScript expression holds."""
    self._browser.execute_async_script(
      'const done = arguments[arguments.length - 1];'
      f'(function look() {{ if ({condition}) done(); '
      'else setTimeout(look, 10); })()'
    )

  def texts(self, css):
    return self.js(
      f'[...document.querySelectorAll({css!r})].map(x => x.textContent)'
    )
