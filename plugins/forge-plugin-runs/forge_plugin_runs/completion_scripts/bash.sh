# Completion of forge-run in bash:  source <(forge-run completion bash)
_forge_run() {
    local line="${COMP_LINE:0:COMP_POINT}" reply prefix=
    # bash divides words at = and :, and puts a reply in place of the part after them
    if [[ $line != *[[:space:]] ]]; then
        local word="${line##*[[:space:]]}"
        [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && prefix="${word%"${word##*:}"}"
        [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && prefix="${word%"${word##*=}"}"
    fi
    COMPREPLY=()
    while IFS= read -r reply; do
        COMPREPLY+=("${reply#"$prefix"}")
    done < <("${COMP_WORDS[0]}" completion --line "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
    [[ ${#COMPREPLY[@]} -eq 1 && -z ${COMPREPLY[0]} ]] && COMPREPLY=()
    return 0
}
complete -F _forge_run forge-run
