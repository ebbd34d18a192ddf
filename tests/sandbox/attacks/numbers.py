"""Numbers of the system calls that attacks make, by architecture."""

from __future__ import annotations

_TABLE = """
getpid 39 172; socket 41 198; connect 42 203; bind 49 200; listen 50 201; accept 43 202; accept4
288 242; sendmsg 46 211; sendmmsg 307 269; recvmsg 47 212; setsockopt 54 208; socketpair 53 199;
sendto 44 206; ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271;
process_madvise 440 440; process_mrelease 448 448; pidfd_getfd 438 438; pidfd_open 434 434;
pidfd_send_signal 424 424; kcmp 312 272; io_uring_setup 425 425; io_uring_enter 426 426;
io_uring_register 427 427; io_setup 206 0; io_submit 209 2; keyctl 250 219; add_key 248 217;
request_key 249 218; bpf 321 280; perf_event_open 298 241; userfaultfd 323 282; memfd_create 319
279; memfd_secret 447 447; mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51;
move_mount 429 429; open_tree 428 428; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick
433 433; mount_setattr 442 442; setns 308 268; unshare 272 97; seccomp 317 277; kexec_load 246
104; kexec_file_load 320 294; init_module 175 105; finit_module 313 273; delete_module 176 106;
reboot 169 142; swapon 167 224; swapoff 168 225; quotactl 179 60; quotactl_fd 443 443; acct 163
89; syslog 103 116; settimeofday 164 170; clock_settime 227 112; clock_adjtime 305 266; adjtimex
159 171; sethostname 170 161; setdomainname 171 162; open_by_handle_at 304 265; name_to_handle_at
303 264; fanotify_init 300 262; inotify_init1 294 26; vhangup 153 58; shmget 29 194; shmat 30 196;
shmctl 31 195; msgget 68 186; msgsnd 69 189; msgctl 71 187; semget 64 190; semop 65 193; semctl 66
191; mq_open 240 180; mlock 149 228; mlock2 325 284; mlockall 151 230; splice 275 76; tee 276 77;
vmsplice 278 75; sync 162 81; syncfs 306 267; sched_setaffinity 203 122; sched_setscheduler 144
119; sched_setattr 314 274; sched_setparam 142 118; setpriority 141 140; ioprio_set 251 30; capset
126 91; setuid 105 146; setgid 106 144; setgroups 116 159; setresuid 117 147; setresgid 119 149;
setreuid 113 145; setregid 114 143; setfsuid 122 151; setxattr 188 5; fchown 93 55; fchownat 260
54; migrate_pages 256 238; move_pages 279 239; mbind 237 235; set_mempolicy 238 237; timer_create
222 107; remap_file_pages 216 234; pkey_alloc 330 289; landlock_create_ruleset 444 444;
landlock_restrict_self 446 446; clone 56 220; clone3 435 435; fork 57 -; vfork 58 -; prctl 157
167; personality 135 92; ioctl 16 29; fcntl 72 25; mknodat 259 33; iopl 172 -; ioperm 173 -;
modify_ldt 154 -; arch_prctl 158 -; nfsservctl 180 42; lookup_dcookie 212 18; openat2 437 437;
execveat 322 281; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240; prlimit64 302 261; ustat 136
-; sysfs 139 -; uselib 134 -; create_module 174 -; capget 125 90; munmap 11 215
"""

NUMBERS: dict[str, dict[str, int]] = {"x86_64": {}, "aarch64": {}}
for _entry in _TABLE.replace("\n", " ").split(";"):
    _name, _x86, _arm = _entry.split()
    for _architecture, _number in (("x86_64", _x86), ("aarch64", _arm)):
        if _number != "-":
            NUMBERS[_architecture][_name] = int(_number)
