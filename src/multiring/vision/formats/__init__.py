"""Read and write other programs' files of labels: COCO, VOC, YOLO, CSV, folders of classes, masks as PNG."""
