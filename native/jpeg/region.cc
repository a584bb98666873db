// Decodes a part of a JPEG: the pixels that decoding the whole file would give there, in less time.
//
// The library is libjpeg-turbo, whose jpeg_skip_scanlines and jpeg_crop_scanline leave out the work for pixels that are
// not wanted. The files are not trusted: the library checks them, and its first warning ends the decoding. Python calls
// these functions without its lock, by ctypes.

#include <algorithm>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstring>

// It needs the declarations of <cstddef> and <cstdio>.
#include <jpeglib.h>

namespace {

// A progressive file may have any number of scans, each of which costs time for all pixels. Encoders write about ten.
constexpr int kMostScans = 500;
constexpr int kComponents = 3;

struct DecodingEnd {
  jpeg_error_mgr base;
  std::jmp_buf place;
};

[[noreturn]] void end_decoding(j_common_ptr info) {
  std::longjmp(reinterpret_cast<DecodingEnd*>(info->err)->place, 1);
}

void note_message(j_common_ptr info, int level) {
  if (level < 0) end_decoding(info);  // a warning: the pixels would be guesses
}

void count_scans(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMostScans) end_decoding(info);
}

struct Decoding {
  jpeg_decompress_struct info{};
  DecodingEnd ending{};
  jpeg_progress_mgr progress{};
};

[[noreturn]] void refuse(Decoding& decoding) { std::longjmp(decoding.ending.place, 1); }

void begin(Decoding& decoding, const unsigned char* file, std::size_t size) {
  auto& info = decoding.info;
  jpeg_create_decompress(&info);
  decoding.progress.progress_monitor = &count_scans;
  info.progress = &decoding.progress;
  jpeg_mem_src(&info, file, static_cast<unsigned long>(size));
  jpeg_read_header(&info, TRUE);
}

// Runs `step`, and returns whether the library had nothing to object. Nothing that needs a destructor may live in `step`
// while the library runs, because an error leaves it by longjmp.
template <typename Step>
bool run(Decoding& decoding, Step step) {
  auto& ending = decoding.ending;
  decoding.info.err = jpeg_std_error(&ending.base);
  ending.base.error_exit = &end_decoding;
  ending.base.emit_message = &note_message;
  volatile bool is_sound = false;
  if (setjmp(ending.place) == 0) {
    step();
    is_sound = true;
  }
  jpeg_destroy_decompress(&decoding.info);
  return is_sound;
}

// Returns whether a progressive file lacks bits of its coefficients. The library guesses them from the blocks around.
bool lacks_bits(const jpeg_decompress_struct& info) {
  if (info.coef_bits == nullptr) return false;
  for (int component = 0; component < info.num_components; ++component) {
    const int* bits = info.coef_bits[component];
    if (std::any_of(bits, bits + DCTSIZE2, [](int missing) { return missing != 0; })) return true;
  }
  return false;
}

// Decodes `height` rows of `width` pixels from (top, left) on to `pixels`: red, green, blue, row by row without gaps.
// The region must lie in the picture. `row` is memory for one row of the whole picture. Returns whether the file is
// sound; without `reads_all`, up to the end of the region. Some sound files must be decoded whole, and count as unsound.
bool decode_region(const unsigned char* file, std::size_t size, long top, long left, long height, long width,
                   unsigned char* pixels, unsigned char* row, std::size_t row_size, bool reads_all) {
  Decoding decoding;
  return run(decoding, [&] {
    auto& info = decoding.info;
    begin(decoding, file, size);
    info.out_color_space = JCS_RGB;
    info.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info);
    if (lacks_bits(info)) refuse(decoding);
    if (top < 0 || left < 0 || height < 1 || width < 1 || top + height > static_cast<long>(info.output_height)) {
      refuse(decoding);
    }
    // The colours of a pixel are interpolated from those of its neighbours. So many columns more on each side make the
    // pixels of the region those of the whole picture; the library does the same for rows.
    const long colour = info.max_h_samp_factor;
    const long block_rows = static_cast<long>(info.max_v_samp_factor) * DCTSIZE;
    auto first = static_cast<JDIMENSION>(std::max(0L, left - colour));
    const long end = std::min<long>(info.output_width, left + width + colour);
    auto columns = static_cast<JDIMENSION>(end - static_cast<long>(first));
    jpeg_crop_scanline(&info, &first, &columns);
    const long offset = left - static_cast<long>(first);
    if (row_size < static_cast<std::size_t>(info.output_width) * kComponents || offset < 0 ||
        offset + width > static_cast<long>(info.output_width)) {
      refuse(decoding);
    }
    if (top > 0 && jpeg_skip_scanlines(&info, static_cast<JDIMENSION>(top)) != static_cast<JDIMENSION>(top)) {
      refuse(decoding);
    }
    const auto row_bytes = static_cast<std::size_t>(width) * kComponents;
    for (long number = 0; number < height; ++number) {
      JSAMPROW into = row;
      if (jpeg_read_scanlines(&info, &into, 1) != 1) refuse(decoding);
      std::memcpy(pixels + static_cast<std::size_t>(number) * row_bytes,
                  row + static_cast<std::size_t>(offset) * kComponents, row_bytes);
    }
    if (!reads_all) return;
    // Damage in the region often shows only later, where the stream of bits ends too early or too late. The library does
    // not read rows to skip at the very end, so the last block's rows are decoded.
    const long left_out = static_cast<long>(info.output_height) - block_rows - static_cast<long>(info.output_scanline);
    if (left_out > 0) jpeg_skip_scanlines(&info, static_cast<JDIMENSION>(left_out));
    while (info.output_scanline < info.output_height) {
      JSAMPROW into = row;
      if (jpeg_read_scanlines(&info, &into, 1) != 1) refuse(decoding);
    }
    jpeg_finish_decompress(&info);
  });
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Reads the height and the width of a file in memory. Returns whether the header is sound, and the colours are some that
// `multiring_jpeg_regions` decodes.
EXPORTED bool multiring_jpeg_size(const unsigned char* file, std::size_t size, long* height, long* width) {
  Decoding decoding;
  return run(decoding, [&] {
    begin(decoding, file, size);
    *height = static_cast<long>(decoding.info.image_height);
    *width = static_cast<long>(decoding.info.image_width);
    const auto space = decoding.info.jpeg_color_space;
    if (space != JCS_GRAYSCALE && space != JCS_RGB && space != JCS_YCbCr) refuse(decoding);
  });
}

// Decodes `count` regions, one after the other, as `decode_region` does: one call for the samples of a batch costs
// Python's lock once. `boxes` are four numbers for each region: top, left, height, width. `are_sound` gets the results.
EXPORTED void multiring_jpeg_regions(std::size_t count, const unsigned char* const* files, const std::size_t* sizes,
                                     const long* boxes, unsigned char* const* pixels, unsigned char* row,
                                     std::size_t row_size, const bool* read_all, bool* are_sound) {
  for (std::size_t i = 0; i < count; ++i) {
    const long* box = boxes + 4 * i;
    are_sound[i] =
        decode_region(files[i], sizes[i], box[0], box[1], box[2], box[3], pixels[i], row, row_size, read_all[i]);
  }
}

}  // extern "C"
