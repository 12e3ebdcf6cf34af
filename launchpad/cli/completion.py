"""`launchpad completion`: print the script that has a shell complete launchpad's command lines."""

from __future__ import annotations

import click

from launchpad.cli.shells import COMPLETION, SHELLS
from launchpad.errors import UsageError

# Each asks launchpad what can stand at the cursor (complete.py): a line for each possibility, with its kind, what would
# stand there, and what that is. What goes wrong meanwhile must not be written over the prompt.
_BASH = r"""
_launchpad() {
    local kind value
    COMPREPLY=()
    while IFS=$'\t' read -r kind value; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            part) compopt -o nospace; COMPREPLY+=("$value") ;;
            whole) COMPREPLY+=("$value") ;;
        esac
    done < <(
        @VARIABLE@=bash COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT COMP_WORDBREAKS=$COMP_WORDBREAKS \
            "${1/#\~/$HOME}" </dev/null 2>/dev/null
    )
}
complete -o nosort -F _launchpad launchpad
"""

_ZSH = r"""#compdef launchpad
_launchpad() {
    local kind value about
    local -a whole part
    while IFS=$'\t' read -r kind value about; do
        case $kind in
            file) compset -P '--*='; _files ;;
            dir) compset -P '--*='; _files -/ ;;
            part) part+=("${value//:/\\:}${about:+:$about}") ;;
            whole) whole+=("${value//:/\\:}${about:+:$about}") ;;
        esac
    done < <(
        @VARIABLE@=zsh ${~${(Q)words[1]}} "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" </dev/null 2>/dev/null
    )
    (( $#whole )) && _describe -V launchpad whole
    (( $#part )) && _describe -V launchpad part -S ''
}
if [[ $funcstack[1] == _launchpad ]]; then
    _launchpad "$@"
else
    compdef _launchpad launchpad
fi
"""

_FISH = r"""
function __launchpad_complete
    set -l token (commandline -ct)
    set -l option (string match -r -- '^--[^=]*=' $token)
    for line in (env @VARIABLE@=fish (commandline -opc) "$token" </dev/null 2>/dev/null)
        set -l fields (string split \t -- $line)
        switch $fields[1]
            case file
                string replace -r '^' -- "$option" (__fish_complete_path (string replace -- "$option" '' $token))
            case dir
                string replace -r '^' -- "$option" (__fish_complete_directories (string replace -- "$option" '' $token))
            case '*'
                printf '%s\t%s\n' $fields[2] $fields[3]
        end
    end
end
complete -c launchpad -f -k -a '(__launchpad_complete)'
"""

_TCSH = r"""
complete launchpad 'p@*@`env @VARIABLE@=tcsh sh -c "exec launchpad </dev/null 2>/dev/null"`@'
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH, "tcsh": _TCSH}


def script(shell: str) -> str:
    """What the shell is to read."""
    return _SCRIPTS[shell].lstrip("\n").replace("@VARIABLE@", COMPLETION)


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", default="", required=False, metavar="|".join(SHELLS))
def command(shell: str) -> int:
    """Print the script that has a shell complete commands, options, job ids, hosts and files at the Tab key.

    \b
    bash:  launchpad completion bash > ~/.local/share/bash-completion/completions/launchpad
    zsh:   launchpad completion zsh > DIR/_launchpad     (DIR is in $fpath, before compinit)
    fish:  launchpad completion fish > ~/.config/fish/completions/launchpad.fish
    tcsh:  launchpad completion tcsh >> ~/.tcshrc

    Or, in ~/.bashrc, or in ~/.zshrc after compinit: eval "$(launchpad completion bash)"
    """
    if shell not in SHELLS:
        given = f"there is no script for {shell}" if shell else "launchpad completion needs a shell"
        raise UsageError(f"{given}; write launchpad completion {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    click.echo(script(shell), nl=False)
    return 0
