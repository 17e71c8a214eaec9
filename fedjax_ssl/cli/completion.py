"""Tab completion for bash and zsh: a script with the commands, flags, configs and fields of this version."""

from collections.abc import Mapping

from fedjax_ssl.cli.help import Command
from fedjax_ssl.cli.source_docs import read_fields, read_methods
from fedjax_ssl.errors import UserError, known_are
from fedjax_ssl.fields import shared_fields
from fedjax_ssl.files import CONFIGS

# The script reads the word from the line, because bash splits words at = and :, and completes the last part only.
_BASH = """\
_fedjax_ssl() {{
  local line word words
  line=${{COMP_LINE:0:COMP_POINT}}
  word=${{line##* }}
  case $line in
{cases}
    *) words="{start}" ;;
  esac
  case $word in
    *=*) words="{values}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ $word == --*=* && ${{#COMPREPLY[@]}} -eq 0 ]] && COMPREPLY=($(compgen -f -P "${{word%%=*}}=" -- "${{word#*=}}"))
  [[ $word != -* && ${{#COMPREPLY[@]}} -eq 0 ]] && COMPREPLY=($(compgen -f -- "$word"))
  [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*[=:]}}"}}"}}")
}}
complete -F _fedjax_ssl fedjax-ssl
"""

_ZSH = """\
#compdef fedjax-ssl
_fedjax_ssl() {{
  local word=$PREFIX line="${{words[*]}} "
  local -a found
  case $line in
{cases}
    *) found=({start}) ;;
  esac
  [[ $word == *=* ]] && found=({values})
  local -i none=0
  compadd -S '' -- ${{(M)found:#*=}} || none+=1
  compadd -- ${{found:#*=}} || none+=1
  (( none < 2 )) && return
  if [[ $word == --*=* ]]; then
    compset -P '*='
    _files
  elif [[ $word != -* ]]; then
    _files
  fi
}}
compdef _fedjax_ssl fedjax-ssl
"""


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """The script that a shell evaluates.

    Args:
        shell: 'bash' or 'zsh'.
        commands: the table of commands.

    Raises:
        UserError: another shell.
    """
    scripts = {"bash": _BASH, "zsh": _ZSH}
    if shell not in scripts:
        raise UserError(f"no completion for {shell!r}{known_are(shell, scripts)}")
    fields = [f"--config.{name}=" for name in read_fields()]
    everywhere = ["--help", "--quiet", "--verbose"]

    def words_of(command: Command) -> list[str]:
        flags = [f"--{name}{'' if type(default) is bool else '='}" for name, (default, _) in command.flags.items()]
        sweeps = [f"configs/sweeps/{path.name}" for path in sorted((CONFIGS / "sweeps").glob("*.py"))]
        takes_fields = "config" in command.flags or command.words.startswith("FILE")
        return [*flags, *everywhere, *(fields if takes_fields else []), *(sweeps if "FILE" in command.words else [])]

    cases = "\n".join(
        f"    *' {name} '*) {_assigned(shell, words_of(command))} ;;"
        for name, command in commands.items()
        if name != "train"
    )
    start = [*commands, "--version", *words_of(commands["train"])]
    return scripts[shell].format(cases=cases, start=" ".join(start), values=" ".join(_values()))


def _assigned(shell: str, words: list[str]) -> str:
    return f'words="{" ".join(words)}"' if shell == "bash" else f"found=({' '.join(words)})"


def _values() -> list[str]:
    """Flags and fields with each of their values, if these are few."""
    configs = [f"--config=configs/{path.name}" for path in sorted(CONFIGS.glob("*.py"))]
    fields = {"method": tuple(read_methods())}
    for name, its_range in shared_fields().ranges().items():
        fields.setdefault(name, ("true", "false") if its_range.kind is bool else its_range.choices)
    return [*configs, *(f"--config.{name}={value}" for name, values in fields.items() for value in values)]
