#include "goodput.h"

#include <linux/tcp.h>  // not <netinet/tcp.h>, whose tcp_info has no delivery rate
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace multiring {

uint64_t goodput_of(int socket) {
  // Samples taken while the sender had too little to send never lower the rate (Linux, net/ipv4/tcp_rate.c).
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof(info.tcpi_delivery_rate) ? 0 : info.tcpi_delivery_rate;
}

}  // namespace multiring
