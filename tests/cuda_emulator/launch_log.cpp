// Which kernels ran, by name.
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "engine.h"

namespace cuda_emulator {
namespace {

struct Launch {
  const void* kernel;
  unsigned blocks, threads;
};
std::mutex mutex;
std::vector<Launch>& launches = *new std::vector<Launch>;

// The symbol at `offset` in an ELF file, by its full symbol table: kernels are hidden from the dynamic one.
std::string symbol_in_file(const char* path, uintptr_t base, uintptr_t address) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) return "";
  const size_t size = size_t(status.st_size);
  void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return "";
  const char* image = static_cast<const char*>(mapped);
  std::string name;
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  if (header->e_type != ET_EXEC) address -= base;
  for (int s = 0; s < header->e_shnum && name.empty(); ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + sections[s].sh_offset);
    const char* names = image + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym) && name.empty(); ++i)
      if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC && symbols[i].st_value == address)
        name = names + symbols[i].st_name;
  }
  munmap(mapped, size);
  return name;
}

// "void ns::f<int, 4>(float*)": without the return type, which only templates show, and the parameters.
std::string without_types(const std::string& signature) {
  size_t begin = 0, depth = 0;
  for (size_t i = 0; i < signature.size(); ++i) {
    const char c = signature[i];
    const bool anonymous = signature.compare(i, 21, "(anonymous namespace)") == 0;
    if (c == '<') ++depth;
    if (c == '>') --depth;
    if (c == ' ' && depth == 0) begin = i + 1;
    if (anonymous) {
      i += 20;
      continue;
    }
    if (c == '(' && depth == 0) return signature.substr(begin, i - begin);
  }
  return signature;
}

std::string find_name(const void* kernel) {
  Dl_info info{};
  if (!dladdr(kernel, &info)) return "unknown";
  std::string symbol = symbol_in_file(info.dli_fname, reinterpret_cast<uintptr_t>(info.dli_fbase),
                                      reinterpret_cast<uintptr_t>(kernel));
  if (symbol.empty()) return info.dli_sname && info.dli_saddr == kernel ? info.dli_sname : "unknown";
  int status;
  char* demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  const std::string name = demangled ? without_types(demangled) : symbol;
  free(demangled);
  return name;
}

}  // namespace

std::string kernel_name(const void* kernel) {
  static std::mutex names_mutex;
  static auto& names = *new std::map<const void*, std::string>;
  const std::lock_guard<std::mutex> lock(names_mutex);
  std::string& name = names[kernel];
  if (name.empty()) name = find_name(kernel);
  return name;
}

void log_launch(const Grid& grid) {
  const std::lock_guard<std::mutex> lock(mutex);
  launches.push_back({grid.bound.kernel, grid.blocks, grid.threads});
}

std::vector<LaunchRecord> launch_log() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<LaunchRecord> records;
  for (const Launch& launch : launches) records.push_back({kernel_name(launch.kernel), launch.blocks, launch.threads});
  return records;
}

void clear_launch_log() {
  const std::lock_guard<std::mutex> lock(mutex);
  launches.clear();
}

}  // namespace cuda_emulator

const char* lossguard_emulator_log() {
  thread_local std::string text;
  text.clear();
  for (const cuda_emulator::LaunchRecord& record : cuda_emulator::launch_log())
    text += record.kernel + '\t' + std::to_string(record.blocks) + '\t' + std::to_string(record.threads) + '\n';
  return text.c_str();
}

void lossguard_emulator_clear_log() { cuda_emulator::clear_launch_log(); }
