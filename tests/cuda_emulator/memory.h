// Mapped pinned memory: what a kernel writes there reaches the host late, and in the order that fences give.
//
// The host's and the device's pointers are two buffers. A device write is pending until it is published, which happens
// when the host learns that the kernel is done: it synchronizes, or an event is complete. Host writes reach the device
// before the next kernel.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cuda_emulator {

void* map_pages(size_t size);  // zeroed, touched by nobody

void* allocate_mapped(size_t size);  // the host's pointer; null where there is no memory
bool free_mapped(void* host);
void* device_pointer(void* host);  // of any address within; null if it is not mapped memory
bool is_mapped(const void* host);

// Pending writes are numbered. A seal numbers those made since the last one, so that they are published after all
// earlier ones: __threadfence_system() and the end of a kernel do that.
void seal_mapped_memory();
uint64_t pending_writes();    // the number after the last
uint64_t published_writes();  // of those that are no longer pending
void publish_mapped_memory(uint64_t up_to);
void update_device_from_host();

}  // namespace cuda_emulator
