#include "board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace standin {
namespace {

constexpr char kMagic[8] = "standin";
constexpr size_t kPage = 4096;
constexpr size_t kBoxes = (sizeof(RankEntry) * kMostRanks + kPage - 1) / kPage * kPage;
constexpr size_t kSlots = kBoxes + (sizeof(Box) * kMostRanks * kMostRanks + kPage - 1) / kPage * kPage;
constexpr size_t kAll = kSlots + kSlotBytes * kMostRanks;

}  // namespace

bool Board::make(BoardId* id) {
  std::memcpy(id->magic, kMagic, sizeof id->magic);
  id->process = ::getpid();
  if (::getrandom(&id->nonce, sizeof id->nonce, 0) != sizeof id->nonce) return false;
  id->file = ::memfd_create(("standin-" + std::to_string(id->nonce)).c_str(), MFD_CLOEXEC);
  return id->file >= 0 && ::ftruncate(id->file, static_cast<off_t>(kAll)) == 0;
}

Board* Board::open(const BoardId& id) {
  if (std::memcmp(id.magic, kMagic, sizeof id.magic) != 0) return nullptr;
  const std::string path = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
  char target[128] = {};
  if (::readlink(path.c_str(), target, sizeof target - 1) < 0) return nullptr;
  if (std::strstr(target, std::to_string(id.nonce).c_str()) == nullptr) return nullptr;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* base = ::mmap(nullptr, kAll, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  ::close(file);
  return base == MAP_FAILED ? nullptr : new Board(static_cast<char*>(base), id.nonce);
}

Board::~Board() { ::munmap(base_, kAll); }

Box& Board::box(int from, int to) const {
  return reinterpret_cast<Box*>(base_ + kBoxes)[from * kMostRanks + to];
}

char* Board::slot(int number) const { return base_ + kSlots + kSlotBytes * number; }

}  // namespace standin
