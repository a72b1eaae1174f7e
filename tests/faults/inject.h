// Declares what the two sources of the fault injector share. See inject.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// Counts an allocation and returns nonzero if it has to fail. Allocations before the first call that concerns the
// watched directory and those of exit handlers do not count: they belong to the start and the end of libtorch.
int inject_allocation_fails(void);

#ifdef __cplusplus
}
#endif
