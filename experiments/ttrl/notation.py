"""Rewrites what people write around and in a formula as one notation, LaTeX.

`values` says what is read.
"""

import re
import unicodedata

from latex2sympy2_extended.math_normalization import extract_boxed_content

_CHARACTERS = str.maketrans('−–‐÷。、٬’ʼ“”', '---/.,,\'\'""') | str.maketrans(
  {
    '±': r'\pm ',
    '×': r'\times ',
    '·': r'\cdot ',
    '√': r'\sqrt ',
    '∞': r'\infty ',
    '∈': r'\in ',
  }
)
_ROOT = re.compile(
  r'(?:√|(?<![\\A-Za-z])sqrt) *((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)'
)
# In this order.
_REWRITTEN = [
  (re.compile(pattern), new)
  for pattern, new in (
    (r'(\d+)\u2044(\d+)', r'\\frac{\1}{\2}'),  # a half, as NFKC writes it
    (r'\\!\s*|\\(?:(?:display|text)style|neg[a-z]+space)(?![A-Za-z])', ''),
    (
      r'(?<!\\)\\[,;:> ]|\\[hm]space\*?\s*\{[^{}]*\}'
      r'|\\(?:enskip|[a-z]*space)(?![A-Za-z])|~|\s',
      ' ',
    ),
    (r'(?<=\d)(?: |\{ *\}){1,3}(?=\d)', ' '),
    (r'\\q?quad(?![A-Za-z])', '  '),  # too wide to be inside a number
    (r'\bper cent\b', 'percent'),
    (r'\\varnothing(?![A-Za-z])|∅', r'\\emptyset '),
    (r'(?<=[\w)])\*\*(-?\w+(?:\.\d+)?|\([^()]*\))', r'^{\1}'),
    (
      r'\\(math(?:bb|bf|it|rm)|vec|hat|bar|overline) +([A-Za-z])(?![A-Za-z])',
      r'\\\1{\2}',
    ),
    (r'\\(?:math(?:it|sf)|boldsymbol|bm) *(?=\{)', r'\\mathbf'),
    (r'(?:\^\s*\{?\s*(?:°|\\circ|\\degree)\s*\}?|°|\\degree)\s*', r'^\\circ '),
    (r'(\{[^{}]*\^)\{(\d)\}(?=\s*\})', r'\1\2'),  # \text{cm^{2}}
    (
      r'\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|[mh]box)\s*\{([^{}]*)\}',
      r'\\text{\1}',
    ),
    (r'\\text\{\s*([ie])\s*\}', r' \1 '),  # the numbers, upright
    (r"(?<=[A-Za-z)}])'+(?![A-Za-z])", r'^{\\prime}'),
    (r'\\?sqrt\s*\(([^()]*)\)', r'\\sqrt{\1}'),
    (r'\\[dtc]?frac\s*(\d)\s+(\d)', r'\\frac{\1}{\2}'),
    (r'(?<![\d.])(\d+) +(\d+) */ *(\d+)(?![\d.])', r'\1\\frac{\2}{\3}'),
    # Repeating decimals: 0.\dot{1}2\dot{3}, 0.1(6) and 0.333... as \overline.
    (r'\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?', r'\\overline{\1\2\3}'),
    (r'(\.\d*)\((\d+)\)', r'\1\\overline{\2}'),
    (
      r'(\.\d{0,9}?)(\d{1,9}?)\2{2,}(?:\.\.\.|\\[lc]?dots)',
      r'\1\\overline{\2}',
    ),
    # 0{,}5 is a decimal, 1{,}234 is not.
    (r'\\math(?:ord|punct)\{,\}', '{,}'),
    (r'(?<![\d,}])(\d{4,}|0)\{,\}(\d)|(\d)\{,\}(?!\d{3}(?!\d))', r'\1\3.\2'),
    (r'(?<=\d)\{,\}(?=\d)', ''),
    # The package drops it, so that \{1, 2, \ldots\} was \{1, 2\}.
    (r'((?:^|[-+,{(\[]) *)(?:\.{3}|\\[lc]?dots(?![a-z]))', r'\1\\mathbf{dots}'),
    # Numbers of a program: 1e-05.
    (
      r'(?<![\w\\^{.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.^({\\])',
      r'(\1\\times 10^{\2})',
    ),
  )
]
_DOLLARS = re.compile(r'(?<!\\)\$')
TEXT = re.compile(r'\\text\{([^{}]*)\}')
_AND = re.compile(r'(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])')
_ENDS = re.compile(r'^(=|≈|\\approx(?![a-z]))|(?<!\\right)([\s.,;:?]|\\\\)+$')
_AROUND = re.compile(
  r'\\\((?P<a>.*)\\\)|\\\[(?P<b>.*)\\\]|(?P<mark>\*+|"|\'|`+)(?P<c>.*)(?P=mark)',
  re.DOTALL,
)
_REPEATING = re.compile(r'(\d*)\.(\d*)\s*\\(?:overline|bar)\s*\{?(\d+)\}?')
_THOUSANDS = r'(?<![\d.,^_])(?!0)\d{{1,3}}(?:{0}\d{{3}})+(?!\d)'
_SPACED = re.compile(
  _THOUSANDS.format(r"(?:[ ']|\\?_)") + r'|\.\d{3}(?: \d{3})* \d{1,3}(?!\d)'
)
_COMMAS = re.compile(_THOUSANDS.format(','))
# 12 34, 1.2.3, 1_000 as a base, and 0x1F, which is no product with x.
_SIDE_BY_SIDE = re.compile(
  r'(?:(?<![\d.^_])\d[\d.]*|\\circ) +\.?\d|\d\.\d+\.\d|\d *_ *\{? *\d{3}'
  r'|(?<![\w.])0[xob][\da-fA-F]'
)
# Words among the symbols: of four letters or more, with their neighbours, and
# short units behind a number. Commands and names of functions are none.
LETTER = r'[^\W\d_]'
_WORDS = re.compile(
  r'\\text\{[^{}]*\}'
  r'|\\(?:overline|overrightarrow|vec|bar|hat|operatorname|math\w+|begin|end)'
  r'\s*\{[^{}]*\}(?:\{[clr|]*\})?'
  r'|\\[A-Za-z]+'
  r'|(?<![A-Za-z])(?P<name>(?:arc)?(?:sin|cos|tan|cot)h?|log|ln|exp|sqrt|pi'
  r'|infty)(?![A-Za-z])'
  rf'|(?<!{LETTER})(?P<word>(?:{LETTER}{{2,}}[ \'.-]+)*'
  rf'(?![a-dw-z]+(?!{LETTER})){LETTER}{{4,}}(?:[ \'.-]+{LETTER}+)*'
  r'|(?<=[\d}) ])(?:(?:k?m|cm|mi|ft)/(?:hr?|s(?:ec)?|min)|[cdkm]m|kg|m[lL]'
  r'|ft|yd|in|lbs?|oz|hrs?|mins?|secs?|day|mph|pct|deg|rad'
  r'|(?<=\d )[a-z]?[eou][a-z])|(?<=\\circ )[CF])'
  rf'(?!{LETTER})'
)
_SCALES = {
  'dozen': 12,
  'hundred': 100,
  'thousand': 10**3,
  'million': 10**6,
  'billion': 10**9,
  'trillion': 10**12,
}
_SCALE = re.compile(
  rf'(?<=[\d}}) ])\\text\{{({"|".join(_SCALES)})\b *([^{{}}]*)\}}'
)


def cleaned(text: str) -> str:
  """Canonical LaTeX of an answer; empty if it is none."""
  if r'\boxed' in text or r'\fbox' in text:
    text = extract_boxed_content(text, 'all')
  # NFKC drops what sets x², x₁, 1½ and ℝ apart.
  text = re.sub('[¹²³⁰-ⁿ]+', r'^{\g<0>}', text)
  text = re.sub('[₀-ₜ]+', r'_{\g<0>}', text)
  text = re.sub('[ℂℕℚℝℤ]', r'\\mathbb{\g<0>}', text)
  text = re.sub('(?=[¼-¾⅐-⅞])', ' ', text)
  text = unicodedata.normalize('NFKC', text.replace('º', '°'))
  text = _ROOT.sub(r'\\sqrt{\1}', text).translate(_CHARACTERS)
  if r'\begin' not in text:  # a row's end
    text = re.sub(r'\\\\(?=[A-Za-z])', r'\\', text)
  for pattern, new in _REWRITTEN:
    text = pattern.sub(new, text)
  if len(_DOLLARS.findall(text)) % 2 == 0:  # else an amount of money
    text = _DOLLARS.sub(' ', text)
  text = TEXT.sub(lambda m: _AND.sub(r'},\\text{', m[0]), text)
  text = _AND.sub(',', text)
  text = re.sub(r'\\text\{\s*(.*?)[\s.,;:]*\}', r'\\text{\1}', text)
  text = text.replace(r'\text{}', ' ')
  before = None
  while text != before:
    before, text = text, _ENDS.sub('', text.strip())
    if m := _AROUND.fullmatch(text):
      text = m['a'] or m['b'] or m['c'] or ''
    elif m := TEXT.fullmatch(text):
      text = m[1]
  text = _REPEATING.sub(_fraction, text)
  text = _SPACED.sub(lambda m: re.sub(r"[ '\\_]", '', m[0]), text)
  if not re.search(r'[(\[]|\\\{', text):  # else commas part elements
    text = _COMMAS.sub(lambda m: m[0].replace(',', ''), text)
    text = re.sub(r'^(-?0),(?=\d{3}$)', r'\1.', text)  # as the packages do
  if _SIDE_BY_SIDE.search(text):
    return ''
  text = marked(text.replace('infinity', 'infty'))
  return _SCALE.sub(lambda m: rf'\times {_SCALES[m[1]]}\text{{{m[2]}}}', text)


def _fraction(m):
  """A repeating decimal as a fraction."""
  whole, first, period = m[1] or '0', m[2], m[3]
  top = int(whole + first + period) - int(whole + first)
  return rf'\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(first)}}}'


def marked(text: str) -> str:
  """Words as \\text, functions as commands."""
  return _WORDS.sub(_mark, text)


def _mark(m):
  if m['name']:
    return rf'\{m[0]} '
  return rf'\text{{{m[0]}}}' if m['word'] else m[0]


def split(text: str, separator: str) -> list[str]:
  """The parts between separators that no bracket holds; none is empty."""
  parts, depth, start = [], 0, 0
  for m in re.finditer(r'\\(?:begin|end)\b|\\?[{}()\[\],;]', text):
    if m[0] == separator and not depth:
      parts.append(text[start : m.start()])
      start = m.end()
    elif m[0] == r'\begin' or m[0][-1] in '{([':
      depth += 1
    elif m[0] == r'\end' or m[0][-1] in '})]':
      depth -= 1
  return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def signs(text: str) -> list[str]:
  """1 \\pm 2 as 1 + 2 and 1 - 2, unless it stands in a set."""
  if re.match(r'(?:\\left\s*)?\\?\{', text):
    return [text]
  both = [
    re.sub(r'\\pm(?![a-z])', one, re.sub(r'\\mp(?![a-z])', other, text))
    for one, other in ('+-', '-+')
  ]
  return list(dict.fromkeys(both))
