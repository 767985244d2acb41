#!/bin/sh
# Starts one pod of an elastic job. The pod with index 0 runs the launcher, which connects to the other pods by
# ssh, starts a worker in each pod, and replaces lost workers. The other pods run sshd.
set -eu
umask 077

fail() {
  echo "$1" >&2
  exit <exit_usage>
}

PATH=$PATH:/usr/sbin
for program in ssh ssh-keygen sshd getent; do
  command -v $program > /dev/null || fail "The image has no $program; build it with 'ctl deploy docker --ssh'."
done
account=$(getent passwd "$(id -u)") || fail "The image has no user $(id -u), which sshd requires."
case $account in
  *nologin | *false) fail "sshd requires a login shell, but the image has '$account' in /etc/passwd.";;
esac

# All pods have the same key. They use it as the key of the host, too, so each pod accepts the others only.
home=$(echo "$account" | cut -d: -f6) files=${0%/*}
directory=$home/.ssh
mkdir -p "$directory/sessions"
cat "$files/ssh-privatekey" > "$directory/key"
ssh-keygen -y -f "$directory/key" > "$directory/authorized_keys"
echo "* $(cat "$directory/authorized_keys")" > "$directory/known_hosts"

if [ "$JOB_COMPLETION_INDEX" = 0 ]; then
  cat > "$directory/config" << END
Host *
  Port 2222
  IdentityFile "$directory/key"
  UserKnownHostsFile "$directory/known_hosts"
END
  # If the name server does not answer later, the list of pods remains as it is.
  cat > "$directory/hosts.sh" << END
#!/bin/sh
pods=\$(getent ahostsv4 <name>) || exit 1
echo "\$pods" | cut -d " " -f 1 | sort -u
END
  chmod 700 "$directory/hosts.sh"
  # The name server learns the address of a new pod after a delay.
  delay_secs=0
  until "$directory/hosts.sh" > /dev/null; do
    if [ $delay_secs = 0 ]; then echo "Waiting for the addresses of the Service <name>."; fi
    if [ $delay_secs -ge <resolve_secs> ]; then
      echo "The name server has no address of the Service <name> after <resolve_secs> s." >&2
      exit <exit_retry>
    fi
    sleep 1
    delay_secs=$((delay_secs + 1))
  done
  exec ctl launch --workers=<elastic> --max_restarts=<max_restarts> --grace_secs=<worker_grace_secs> \
    --host_discovery="$directory/hosts.sh" -- "$@"
fi

# Workers get the variables of the container, which sshd does not pass on.
export -p > "$directory/variables"
cat > "$directory/session.sh" << END
. "$directory/variables"
touch "$directory/sessions/\$\$"
exec /bin/sh -c "\$SSH_ORIGINAL_COMMAND"
END
cat > "$directory/sshd_config" << END
Port 2222
HostKey "$directory/key"
AuthorizedKeysFile "$directory/authorized_keys"
ForceCommand exec /bin/sh "$directory/session.sh"
AuthenticationMethods publickey
AllowTcpForwarding no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
END

has_worker() {
  for file in "$directory"/sessions/*; do
    if kill -0 "${file##*/}" 2> /dev/null; then return 0; fi
  done
  return 1
}

# If the job is deleted, the launcher ends the worker after it has saved. If only this pod is deleted, the worker
# continues until Kubernetes kills it.
end() {
  while has_worker; do sleep 1; done
  kill "$sshd"
  exit <exit_preempted>
}
trap end TERM
"$(command -v sshd)" -D -e -f "$directory/sshd_config" &
sshd=$!
wait "$sshd"
