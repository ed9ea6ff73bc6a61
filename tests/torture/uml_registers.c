/*
 * Preloaded into user-mode-linux on a processor with AMX: it lets the kernel set the registers of its processes.
 *
 * Linux takes a processor's extended state only whole. That of AMX is larger than what user-mode-linux 6.1 has room
 * for: it keeps the front, and what it sets is refused. Here the rest is added, as it is in the process at that moment.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

/* user-mode-linux is one thread, and its stacks are small. */
static char state[1 << 18];

long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(enum __ptrace_request, ...);
	va_list arguments;
	va_start(arguments, request);
	long pid = va_arg(arguments, long);
	void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
	va_end(arguments);
	if (!next)
		next = dlsym(RTLD_NEXT, "ptrace");
	if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE) {
		struct iovec *front = data, whole = {state, sizeof state};
		if (!next(PTRACE_GETREGSET, pid, address, &whole) && whole.iov_len > front->iov_len) {
			memcpy(state, front->iov_base, front->iov_len);
			return next(request, pid, address, &whole);
		}
	}
	return next(request, pid, address, data);
}
