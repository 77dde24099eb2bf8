# Completion of forge-run in fish:  forge-run completion fish > ~/.config/fish/completions/forge-run.fish
function __forge_run
    set -l program (commandline -op)[1]
    $program completion --line (commandline -cp | string collect) 2>/dev/null
end
complete -c forge-run -f -a '(__forge_run)'
