#compdef forge-run
# Completion of forge-run in zsh:  source <(forge-run completion zsh), after compinit
_forge_run() {
    local -a replies open closed
    local reply
    replies=("${(@f)$("${words[1]}" completion --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    for reply in $replies; do
        [[ -z $reply ]] && continue
        if [[ $reply == *[=./] ]]; then open+=("$reply"); else closed+=("$reply"); fi
    done
    (( $#open )) && compadd -Q -S '' -- $open
    (( $#closed )) && compadd -Q -- $closed
    return 0
}
compdef _forge_run forge-run
