"""Expressions and statements that chat templates may use, and some with mistakes."""

# Several stand in a line, or this would be hundreds of lines.
# ruff: noqa: E501

from template_families import ARGUMENTS

A = "messages[0].tool_calls[0].function.arguments"
EXPRESSIONS = [
    # numbers
    *(f"{A}.{name}{how}" for name in ARGUMENTS for how in ("", "|string", "|tojson", " ~ ''", "|pprint")),
    f"{A}|tojson", f"{A}", f"[{A}.g, {A}.f]", f"{A}|tojson(indent=2)", f"{A}|tojson(sort_keys=true)",
    f"{A}|tojson(separators=(',', ':'))", f"{A}|tojson(ensure_ascii=true)", f"{A}|length", f"{A}|xmlattr",
    "1_000", "0x1f", "0b11", "1e3", "1.5e-8", "7 // 2", "-7 // 2", "7.0 // 2", "7 % 3", "-7 % 3", "2 ** 70", "7 / 2",
    "2 ** -1", "1 / 0", "1 // 0", "10 ** 20", "true + 1", "1 < 2 < 3", "1 < 3 < 2", "1 == 1.0", "0.1 + 0.2", "3|float",
    "'3.7'|int", "'x'|int(9)", "'0x1f'|int(base=16)", "3.5|round", "2.5|round", "3.14159|round(2)", "3|round", "3.2|round(method='ceil')",
    "-3|abs", "1000000|filesizeformat", "[3, 1, 2]|sum", "[1, 2.5]|sum", "5 is odd", "6 is divisibleby(3)", "1.0 is integer",
    "1 is float", "true is integer", "true is number", "true is boolean", "1 is true", "none is none", "'a' is string",
    # text
    "'a-b-c'.rsplit('-', 1)", "'a-b'.partition('-')", "'a-b'.rpartition('-')", "'ab'.removeprefix('a')", "'ab'.removesuffix('b')",
    "'abc'.index('c')", "'abcb'.rindex('b')", "'abc'.index('x')", "'abc'.find('x')", "'7'.zfill(3)", "'ẞ'.casefold()", "'a'.ljust(3) ~ '|'",
    "'a'.rjust(3, '*')", "'a'.center(4)", "'a\\tb'.expandtabs(4)", "'a\\nb\\r\\nc\\x0bd'.splitlines()", "'abc'.startswith('b', 1)",
    "'abc'.startswith(('x', 'a'))", "'abca'.count('a')", "'a1'.isalnum()", "'²'.isdigit()", "'٣'.isdecimal()", "'A b'.istitle()",
    "'Ab'.swapcase()", "'ab cd'.title()", "\"it's o'clock\"|title", "'aB'|capitalize", "'%s-%05.2f' % ('a', 1.5)", "'%(a)s' % {'a': 1}",
    "'%s %d'|format('x', 3)", "'{} {!r:>5} {x}'.format(1, 'a', x=2)", "'{0[a]}'.format({'a': 1})", "'a b  c'|wordcount", "'a b'|wordwrap(1)",
    "' a '|trim", "'xxaxx'|trim('x')", "'abc'|reverse", "'abc'|list", "'abc'[::-1]", "'abcdef'[-2:]", "'abcdef'[4:1:-2]", "'abc'[7:]",
    "'abc'[7]", "'abc'|first", "'abc'|last", "'a,b'.split(',')", "' a  b '.split()", "'a'.join(['x', 'y'])", "'abc'|truncate(2)",
    "'hello big world'|truncate(11, true, '...', 0)", "'a' 'b'", "'a' ~ 1 ~ none", "'a' * 3", "'a' + 1", "'b' in 'abc'", "'' in 'abc'",
    "1 in 'abc'", "'<a>'|e", "'<a>'|escape ~ '<b>'", "('<a>'|safe) ~ '<b>'", "('<a>'|safe) + '<b>'", "('<a>'|e|string)|length",
    "'<a>'|forceescape", "'<a>&amp;'|striptags", "'a b&c'|urlencode", "{'a': 1, 'b': 'x y'}|urlencode", "['<', '>'|safe]|join", "'a'|indent(2, true)",
    "'a\\nb\\n\\nc'|indent(width=2, first=true, blank=true)", "'a\\r\\nb'|indent", "'aXb'|replace('X', '<')", "('a<b'|e)|replace('&lt;', '<')",
    "'a'|center(5) ~ '|'", "'é\\u00e9\\x41\\101\\n\\t\\N{BULLET}'", "'caf\\\\u00e9'", "'a\\\nb'", "\"it's\"", "'😀'|length", "'a'.encode()",
    "'a'|lower|upper|string", "'{}'", "'{{ x }}'", "'%d' % 1e3", "'a'.translate({97: 'b'})", "'a'.maketrans({'a': 'b'})",
    "'a_b c'.isidentifier()", "'x' is upper", "'x' is lower", "'a' < 'b'", "'a' < 1", "'10'|float", "'x'|float(2.5)", "'a=1'.split('=', 1)[1]|int",
    # lists and mappings
    "[1, [2, 'x', none, true]]", "(1,)", "(1, 'a')", "{'a': (1, 2)}", "{1: 2}", "{}", "[]", "[1] + [2]", "[1] + (2,)", "[1, 2][-1]", "[1, 2][5]",
    "[1, 2, 3][::-1]", "[3, 1, 2]|sort", "['b', 'A', 'c']|sort", "['b', 'A', 'c']|sort(case_sensitive=true)", "[{'a': 2}, {'a': 1}]|sort(attribute='a')",
    "[3, 1]|sort(reverse=true)|list", "['b', 1]|sort", "[1, 1, 2]|unique|list", "['a', 'A']|unique|list", "[1, 2, 3]|batch(2)|list", "[1, 2, 3]|batch(2, 'x')|list",
    "[1, 2, 3, 4]|slice(3)|list", "[1, 2]|max", "[]|max", "['b', 'a']|min", "[1, 2]|random is number", "[0, 1, '', 'a']|select|list", "[1, 2, 3]|reject('odd')|list",
    "[1, 2]|map('string')|list", "[{'a': 1}, {}]|map(attribute='a')|list", "[{'a': 1}, {}]|map(attribute='a', default=0)|list", "[{'a': {'b': 3}}]|map(attribute='a.b')|list",
    "[{'a': 1}, {'a': 2}]|selectattr('a', 'gt', 1)|list", "[{'a': 1}, {}]|rejectattr('a')|list", "[{'a': 1}, {}]|selectattr('a', 'defined')|list", "[1, 2]|join(', ')",
    "[{'a': 1}]|join(',', attribute='a')", "[{'k': 1, 'v': 2}, {'k': 1, 'v': 3}]|groupby('k')", "{'b': 1, 'a': 2}|dictsort", "{'b': 1, 'A': 2}|dictsort(true)",
    "{'b': 1, 'a': 2}|dictsort(by='value', reverse=true)", "{'a': 1}|items|list", "nothing|items|list", "{'a': 1}.items()", "{'a': 1}.keys()|list", "{'a': 1}.values()|list",
    "{'a': 1}.get('b')", "{'a': 1}.get('b', 3)", "{'a': 1}.b is defined", "{'items': 1}.items is callable", "{'a': 1}['items'] is defined", "{'b': 1, 'a': 2}", "{'a': 1}|list",
    "{'a': 1}|first", "{'a': 1} == {'a': 1.0}", "'a' in {'a': 1}", "1 in [1]", "1 not in [1]", "dict(a=1)", "dict([('a', 1)], b=2)", "dict.fromkeys(['a'], 1)", "{'a': 1}.copy()", "{'a': 1}.pop('a')",
    "[1].index(1)", "[1, 1].count(1)", "[1].append(2)", "[2, 1].sort()", "[1].copy()", "range(3)", "range(3)|list", "range(5, 0, -2)|list", "range(100001)", "range(3)[1]", "range(3)|length",
    "[1, 2, 3]|tojson", "(1, 2)|tojson", "range(3)|tojson", "nothing|tojson", "{1: 2}|tojson", "'<>'|tojson", "'é\\u2028'|tojson", "('a'|safe)|tojson", "cycler('a', 'b').next()", "messages|length",
    # tests and undefined values
    "none is iterable", "{} is sequence", "'ab' is sequence", "'ab' is iterable", "1 is iterable", "[] is mapping", "{} is mapping", "range(2) is sequence", "none is sequence", "nothing is iterable",
    "nothing is defined", "nothing", "nothing.x", "nothing is none", "nothing ~ 'a'", "nothing + 'a'", "nothing|length", "nothing == nothing", "nothing or 'x'", "nothing|default('d')", "none|default('d')",
    "none|default('d', true)", "''|default('d', true)", "''|d('d')", "messages[0].nope", "messages[0].nope.x", "messages[9]", "messages[9].x", "messages[0]['nope'] is undefined", "'x' in nothing", "nothing in 'x'",
    "not nothing", "nothing|list", "nothing|join", "nothing|upper", "nothing|int", "nothing|trim|length", "nothing()", "'a'|nope", "1 is nope", "messages is eq messages", "1 is in [1]", "1 is sameas 1", "'a' is escaped",
    "('a'|e) is escaped", "messages is callable", "raise_exception is callable", "tools is none", "tools is defined", "documents is none", "documents is defined", "bos_token ~ pad_token", "unk_token is defined",
    "1 if false", "(1 if false) is undefined", "'a' if tools else 'b'", "'upper' is filter", "'odd' is test", "true and 'a'", "false or none", "not 1", "True, False, None", "true", "None", "1 == true", "none == false",
    "strftime_now('%Y-%m-%d %H:%M:%S %a %j %-d')", "namespace(a=1).a", "namespace({'a': 2}).a", "namespace(a=1)", "caller is defined", "self is defined", "loop is defined", "lipsum(n=1)|length > 9",
]  # fmt: skip
STATEMENTS = [
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a = [1] %}{% for x in a %}{% set a = 2 %}{% endfor %}{{ a }}", "{% set ns = namespace(x=1) %}{% for i in [1] %}{% set ns.x = 5 %}{% endfor %}{{ ns.x }}",
    "{% set x %}a{{ 1 }}<b>{% endset %}{{ x }}{{ x|length }}", "{% set x | upper %}abc{% endset %}{{ x }}", "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "{% for x in 'abc' %}{{ x }},{% endfor %}",
    "{% for x in [] %}a{% else %}b{% endfor %}", "{% for x in [1, 2, 3] if x > 1 %}{{ loop.index }}{{ x }}{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x in nothing %}a{% else %}b{% endfor %}", "{% for x in 3 %}{% endfor %}",
    "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% if 0 %}a{% elif '' %}b{% else %}c{% endif %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}{{ f() }}{{ f.name }}{{ f.arguments }}", "{% macro f() %}<{{ 1 }}>{% endmacro %}{{ f()|length }}{{ f() ~ '&' }}", "{% macro f() %}{{ messages|length }}{% endmacro %}{{ f() }}",
    "{% call f() %}x{% endcall %}", "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "{% filter upper %}a{% endfilter %}", "{% with x = 1 %}{{ x }}{% endwith %}{{ x }}", "{% raw %}{{ a }}{% endraw %}",
    "{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a is defined }}", "{%- generation -%} x {%- endgeneration -%} y", "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}", "{% do messages %}", "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}",
    "{% block a %}x{{ messages|length }}{% endblock %}{{ self.a() }}", "{% autoescape true %}{{ '<' }}{% endautoescape %}", "{% trans %}a{% endtrans %}", "{# note #}a{#- b -#} c", "  {% if 1 %}\n  a\n  {% endif %}\n  b", "  {%+ if 1 %}\n a{% endif %}", "{% if 1 -%}\n\n a \n\n{%- endif %}",
    "{{ 1 }}\n{{ 2 }}\n", "a\n", "a\n\n", "a\r\nb\rc\n", "\ta {% if 1 %}\tb{% endif %}", "{{ '\r\n'|length }}", "{{ 'a\nb' }}", "\ufeffa", "{{ '\\r\\n'|length }}", "a{{ '' }}\n", "{%- if 1 %} a {% endif -%} \n b", "# for x in y\na", "## x\n", "{{ 1 }", "{% if %}", "{% endif %}", "{{ }}", "{% if 1 %}", "{{ 'a }}", "{{ 1 2 }}", "{{ a.b. }}",
    "{% set messages = messages[1:] %}{{ messages|length }}", "{% if messages[0]['content'] is defined and messages[0].content is none %}n{% endif %}", "{{ raise_exception('no: ' ~ messages|length) }}", "{% set _ = messages.append(1) %}", "{% set _ = messages[0].update({'a': 1}) %}", "{% set dict = dict(a=1) %}{{ dict.a }}",
    "{% set ns = namespace() %}{% set ns.a = [] %}{% set ns.a = ns.a + [1] %}{{ ns.a }}", "{% set ns = namespace(_x=1) %}", "{% set ns = namespace(a={'b': 1}) %}{{ ns.a.b }}{{ ns.c }}{{ ns['a'] }}", "{% for i in range(3) %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.revindex }}{% endfor %}", "{% for i in range(3) recursive %}{{ loop.depth0 }}{% endfor %}",
]  # fmt: skip
