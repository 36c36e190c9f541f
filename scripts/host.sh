# SPDX-License-Identifier: Apache-2.0
# What installing and removing clawd changes on a host besides files, for scripts/install and for the Debian package,
# which has a copy of this text in its scripts.

PREFIX=/opt/clawd
CONFIG=/etc/clawd/clawd.conf
MANIFEST=$PREFIX/manifest
TUNED=/var/lib/clawd-kernel/tune.journal
SERVICES=(clawd.service clawd-gateway.service clawd-kernel.service)
UNITS=("${SERVICES[@]}" clawd.slice clawd_background.slice)

# Without systemd as PID 1, as in an image that is being built, there is nothing to tell
has_systemd() { [ -d /run/systemd/system ]; }

# The user, the runtime directory, and the new units; what runs is started again: its streams stay
activate() {
	systemd-sysusers clawd.conf
	systemd-tmpfiles --create clawd.conf
	has_systemd || return 0
	systemctl daemon-reload
	systemctl try-restart "${SERVICES[@]}"
}

deactivate() {
	# before the helper goes: the kernel as it was, but what somebody else has changed since
	if [ -e "$TUNED" ]; then "$PREFIX/bin/clawctl" tune revert || true; fi
	has_systemd || return 0
	systemctl disable --now "${SERVICES[@]}" 2>/dev/null || true
	systemctl stop clawd.slice || true
	# a slice does not end by itself; what an admin put there is not ours to end
	if find /sys/fs/cgroup -path '*/clawd_background.slice/*' -name cgroup.procs -exec cat {} + 2>/dev/null | grep -q .; then
		say "kept clawd_background.slice: something runs in it"
	else
		systemctl stop clawd_background.slice || true
	fi
	systemctl reset-failed "${SERVICES[@]}" 2>/dev/null || true
}

is_default_config() {
	[ -e "$CONFIG" ] && [ "$(sha256sum <"$CONFIG")" = "$(cat "$MANIFEST.config" 2>/dev/null)" ]
}

remove_empty_below() { find "$1" -mindepth 1 -type d -empty -delete 2>/dev/null || true; }

# What a stopped clawd left for a next one, and its user. What the admin made stays, and is told.
wipe() {
	local instance name path kept=()
	# the id is the first line
	instance=$(head -n 1 /run/clawd/instance 2>/dev/null || true)
	if [[ $instance =~ ^[0-9a-f]{16}$ ]]; then rm -f /dev/shm/clawd-"$instance"-*; fi
	rm -rf /run/clawd /run/clawd-kernel /run/clawd-gateway /var/lib/clawd-kernel
	rmdir /etc/clawd/keys/allow /etc/clawd/keys 2>/dev/null || true
	if [ -d /etc/clawd ] && ! rmdir /etc/clawd 2>/dev/null; then
		for path in /etc/clawd/*; do kept+=("$path"); done
	fi
	for path in /etc/systemd/system/clawd{,-gateway,-kernel}.service.d /etc/systemd/system/clawd{,_background}.slice.d; do
		[ ! -e "$path" ] || kept+=("$path")
	done
	for name in clawd-gateway clawd; do
		if getent passwd $name >/dev/null; then userdel $name 2>/dev/null || kept+=("the user $name"); fi
	done
	# userdel leaves a group that has members
	if getent group clawd >/dev/null; then
		if [ -n "$(getent group clawd | cut -d: -f4)" ]; then
			kept+=("the group clawd, of $(getent group clawd | cut -d: -f4)")
		else
			groupdel clawd
		fi
	fi
	if has_systemd; then systemctl daemon-reload; fi
	for path in "${kept[@]}"; do say "kept $path"; done
}
