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
