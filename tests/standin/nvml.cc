// libnvidia-ml.so.1: the driver's management library. It knows nothing of the other stand-ins. Settings:
//   STANDIN_DEVICES       number of devices (2)
//   STANDIN_KINDS         names of the devices, divided by commas; the last one serves all others ("Stand-in")
//   STANDIN_ANCESTORS     nvmlGpuTopologyLevel_t of pairs, such as "0-1:10,0-2:50"; other pairs: 40
//   STANDIN_NVLINKS       NVLinks of pairs, such as "0-1:4"; or "switch:18", of each device to a switch
//   STANDIN_MIG           numbers of divided devices, divided by commas
//   STANDIN_NVML_REFUSES  the code of nvmlInit_v2 (0)
//   STANDIN_NVML_LACKS    names of functions that answer "not supported", divided by commas
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "declarations.h"

namespace {

constexpr int kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6, kTooSmall = 7;
constexpr int kPartHandle = 1000;  // handles of parts of devices
bool is_open = false;

std::string setting(const char* name, const char* otherwise) {
  const char* found = std::getenv(name);
  return found == nullptr ? otherwise : found;
}

std::vector<std::string> pieces(const std::string& text, char divider) {
  std::vector<std::string> found;
  std::istringstream stream(text);
  for (std::string each; std::getline(stream, each, divider);) found.push_back(each);
  return found;
}

int count() { return std::stoi(setting("STANDIN_DEVICES", "2")); }

// The value of a pair in a setting such as "0-1:10", or `otherwise`.
int of_pair(const char* name, int one, int other, int otherwise) {
  for (const std::string& each : pieces(setting(name, ""), ',')) {
    const std::string ends = each.substr(0, each.find(':'));
    if (ends == std::to_string(one) + "-" + std::to_string(other) ||
        ends == std::to_string(other) + "-" + std::to_string(one))
      return std::stoi(each.substr(each.find(':') + 1));
  }
  return otherwise;
}

int lacks(const char* name) {
  if (!is_open) return kUninitialized;
  for (const std::string& each : pieces(setting("STANDIN_NVML_LACKS", ""), ','))
    if (each == name) return kNotSupported;
  return 0;
}

int index_of(void* handle) { return static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1; }

// The other end of each NVLink of a device: a device's number, or -1 for a switch.
std::vector<int> ends_of(int device) {
  std::vector<int> found;
  const std::string links = setting("STANDIN_NVLINKS", "");
  if (links.rfind("switch:", 0) == 0) return std::vector<int>(static_cast<size_t>(std::stoi(links.substr(7))), -1);
  for (int other = 0; other < count(); ++other)
    if (other != device)
      found.insert(found.end(), static_cast<size_t>(of_pair("STANDIN_NVLINKS", device, other, 0)), other);
  return found;
}

void set_address(NvmlPci* found, int device) {
  std::memset(found, 0, sizeof *found);
  found->bus = static_cast<unsigned>(device < 0 ? 0xa0 : device + 1);
}

int copy_text(const std::string& text, void* to, unsigned size) {
  if (text.size() >= size) return kTooSmall;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}

bool is_divided(int device) {
  for (const std::string& each : pieces(setting("STANDIN_MIG", ""), ','))
    if (each == std::to_string(device)) return true;
  return false;
}

std::string uuid_of(int device) { return "GPU-" + std::to_string(device) + "aaa-bbbb"; }

}  // namespace

extern "C" {
int nvmlInit_v2() {
  const int code = std::stoi(setting("STANDIN_NVML_REFUSES", "0"));
  is_open = code == 0;
  return code;
}
int nvmlShutdown() {
  is_open = false;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* found) {
  *found = static_cast<unsigned>(count());
  return lacks("nvmlDeviceGetCount_v2");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** found) {
  *found = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return static_cast<int>(index) < count() ? lacks("nvmlDeviceGetHandleByIndex_v2") : kInvalidArgument;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** found) {
  // The part of a divided device N is called MIG-N.
  for (int device = 0; device < count(); ++device)
    if (is_divided(device) && uuid == "MIG-" + std::to_string(device)) {
      *found = reinterpret_cast<void*>(static_cast<uintptr_t>(kPartHandle + device));
      return lacks("nvmlDeviceGetHandleByUUID");
    }
  return kNotFound;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void* part, void** found) {
  *found = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(part) - kPartHandle + 1);
  return lacks("nvmlDeviceGetDeviceHandleFromMigDeviceHandle");
}
int nvmlDeviceGetName(void* device, void* text, unsigned size) {
  if (const int code = lacks("nvmlDeviceGetName")) return code;
  const std::vector<std::string> kinds = pieces(setting("STANDIN_KINDS", "Stand-in"), ',');
  const size_t at = static_cast<size_t>(index_of(device));
  return copy_text(kinds[at < kinds.size() ? at : kinds.size() - 1], text, size);
}
int nvmlDeviceGetUUID(void* device, void* text, unsigned size) {
  if (const int code = lacks("nvmlDeviceGetUUID")) return code;
  return copy_text(uuid_of(index_of(device)), text, size);
}
int nvmlDeviceGetPciInfo_v3(void* device, NvmlPci* found) {
  set_address(found, index_of(device));
  return lacks("nvmlDeviceGetPciInfo_v3");
}
int nvmlDeviceGetTopologyCommonAncestor(void* one, void* other, int* level) {
  if (const int code = lacks("nvmlDeviceGetTopologyCommonAncestor")) return code;
  *level = one == other ? 0 : of_pair("STANDIN_ANCESTORS", index_of(one), index_of(other), 40);
  return 0;
}
int nvmlDeviceGetNvLinkState(void* device, unsigned link, int* active) {
  if (const int code = lacks("nvmlDeviceGetNvLinkState")) return code;
  if (link >= 18) return kInvalidArgument;  // the device's places for links; not all need to be in use
  *active = link < ends_of(index_of(device)).size();
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, NvmlPci* found) {
  if (const int code = lacks("nvmlDeviceGetNvLinkRemotePciInfo_v2")) return code;
  const std::vector<int> ends = ends_of(index_of(device));
  if (link >= ends.size()) return kInvalidArgument;
  set_address(found, ends[link]);
  return 0;
}
int nvmlDeviceGetMigMode(void* device, unsigned* now, unsigned* later) {
  if (const int code = lacks("nvmlDeviceGetMigMode")) return code;
  *now = *later = is_divided(index_of(device)) ? 1 : 0;
  return 0;
}
}
